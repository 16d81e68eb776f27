"""One kernel for each shared-memory instruction, its lane addresses read from a table: nothing else touches shared memory."""

from __future__ import annotations

from warploom.smem.access import ACCESSES, Access


def kernel_name(access: Access) -> str:
    return access.name.replace(".", "_")


COPY = "cp_async_128"


def copy_source() -> str:
    """CUDA C++ of a kernel COPY(table, source, out): one cp.async of 16 bytes a lane, launched as one warp.

    `table` holds 32 byte addresses in shared memory, −1 for a lane that is off, then 32 byte offsets from `source`.
    """
    return _COPY


def source() -> str:
    """CUDA C++ of a kernel `NAME(addresses, out)` for each access, launched as one warp with SHARED_BYTES.

    `addresses` holds the 32 lanes' byte addresses as int; −1 switches a lane off. stmatrix needs compute capability 9.0.
    """
    return _SOURCE + "\n".join(_kernel(access) for access in ACCESSES.values())


def _kernel(access: Access) -> str:
    body = _matrix(access) if access.matrix else _lanes(access)
    if access.name.startswith("stmatrix"):
        body = f"#if __CUDA_ARCH__ >= 900\n{body}\n#endif"
    return f"""extern "C" __global__ void {kernel_name(access)}(const int* table, unsigned* out) {{
  START
{body}
  out[threadIdx.x] = r0 ^ r1 ^ r2 ^ r3;
}}
"""


def _matrix(access: Access) -> str:
    count = access.lanes // 8
    registers = ", ".join(f"%{n}" for n in range(count))
    form = f"sync.aligned.m8n8.x{count}{'.trans' if access.name.endswith('.trans') else ''}.shared.b16"
    names = [f"r{n}" for n in range(count)]
    if access.load:
        outputs = ", ".join(f'"=r"({name})' for name in names)
        return f'  asm volatile("ldmatrix.{form} {{{registers}}}, [%{count}];" : {outputs} : "r"(base + address) : "memory");'
    inputs = ", ".join(f'"r"({name})' for name in names)
    return f'  asm volatile("stmatrix.{form} [%{count}], {{{registers}}};" :: {inputs}, "r"(base + address) : "memory");'


def _lanes(access: Access) -> str:
    bits, count = 8 * access.width, max(1, access.width // 4)
    kind = f"{f'.v{count}' if count > 1 else ''}.{'u' if bits < 32 else 'b'}{min(bits, 32)}"
    places = [f"%{n}" for n in range(count)]
    registers = f"{{{', '.join(places)}}}" if count > 1 else places[0]
    names = [f"r{n}" for n in range(count)]
    where, active = f"%{count}", f"%{count + 1}"
    # Predicated within one asm statement: no branch, so a warp with lanes off executes the instruction exactly once.
    head = f"{{ .reg .pred p; setp.ne.s32 p, {active}, 0; "
    if access.load:
        outputs = ", ".join(f'"+r"({name})' for name in names)
        return (
            f'  asm volatile("{head}@p ld.shared{kind} {registers}, [{where}]; }}"\n'
            f'    : {outputs} : "r"(base + address), "r"(int(on)) : "memory");'
        )
    inputs = ", ".join(f'"r"({name})' for name in names)
    return (
        f'  asm volatile("{head}@p st.shared{kind} [{where}], {registers}; }}"\n'
        f'    :: {inputs}, "r"(base + address), "r"(int(on)) : "memory");'
    )


_SOURCE = """
#define START                                                     \\
  extern __shared__ __align__(1024) unsigned char memory[];       \\
  const unsigned base = unsigned(__cvta_generic_to_shared(memory)); \\
  const int entry = table[threadIdx.x];                           \\
  const bool on = entry >= 0;                                     \\
  const int address = on ? entry : 0;                             \\
  unsigned r0 = entry, r1 = entry, r2 = entry, r3 = entry;        \\
  (void)on;

"""

# Lanes that are off leave before the copy: under a predicate ncu would misread it (residual.py).
_COPY = """
extern "C" __global__ void cp_async_128(const int* table, const char* source, unsigned* out) {
  extern __shared__ __align__(1024) unsigned char memory[];
  const unsigned base = unsigned(__cvta_generic_to_shared(memory));
  const int shared = table[threadIdx.x], from = table[32 + threadIdx.x];
  out[threadIdx.x] = base;
  if (shared < 0) asm volatile("exit;");
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" :: "r"(base + shared), "l"(source + from) : "memory");
  asm volatile("cp.async.wait_all;" ::: "memory");
}
"""
