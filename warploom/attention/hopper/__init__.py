"""Exact attention for sm_90a in the CuTe DSL: TMA, wgmma, warp specialisation."""
