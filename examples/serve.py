"""Prompts of different lengths are read at once, packed, and continued token by token from a paged cache.

    python examples/serve.py [--tokens 16] [--seed 0] [--device cpu]

One layer of attention with drawn weights, which shows the three calls that a server makes: attention_varlen() for the prompts,
append() for keys and values, decode() for each new token. What it writes is compared with running whole sequences anew.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn

import warploom

VOCABULARY, DIM, HEADS, HEADS_KV, PAGE = 64, 128, 8, 2, 16


class Model(nn.Module):
    """Embedding, one attention layer with grouped heads, logits."""

    def __init__(self) -> None:
        super().__init__()
        self.head_dim = DIM // HEADS
        self.tokens, self.head = nn.Embedding(VOCABULARY, DIM), nn.Linear(DIM, VOCABULARY)
        self.q, self.kv = nn.Linear(DIM, DIM), nn.Linear(DIM, 2 * HEADS_KV * self.head_dim)

    def project(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v of tokens (…): (…, heads, head_dim)."""
        x = self.tokens(tokens)
        k, v = self.kv(x).unflatten(-1, (2, HEADS_KV, self.head_dim)).unbind(-3)
        return self.q(x).unflatten(-1, (HEADS, self.head_dim)), k, v

    def logits(self, out: Tensor) -> Tensor:
        return self.head(out.flatten(-2))


@torch.no_grad()
def serve(model: Model, prompts: list[Tensor], count: int) -> Tensor:
    """The ``count`` likeliest tokens after each prompt, (prompts, count)."""
    device, most = prompts[0].device, max(len(prompt) for prompt in prompts)
    lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
    starts = nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
    q, k, v = model.project(torch.cat(prompts))
    out = warploom.attention_varlen(q, k, v, starts, max_seqlen_q=most, max_seqlen_k=most, causal=True)
    token = model.logits(out[starts[1:] - 1]).argmax(-1)

    cache = warploom.PagedKVCache.allocate(
        len(prompts), most + count, HEADS_KV, model.head_dim, page_size=PAGE, dtype=k.dtype, device=device
    )
    # append() takes one number of keys for all sequences; a negative slot leaves a key out, here the padding of short prompts.
    k, v = (nn.utils.rnn.pad_sequence(t.split(lengths.tolist()), batch_first=True) for t in (k, v))
    place = torch.arange(most, device=device)
    slots = cache.block_table[:, place // PAGE] * PAGE + place % PAGE
    cache.append(k, v, slot_mapping=slots.masked_fill(place >= lengths[:, None], -1))
    written = [token]
    for _ in range(count - 1):
        q, k, v = (t.unsqueeze(1) for t in model.project(token))  # one new token a sequence
        cache.append(k, v)
        token = model.logits(warploom.decode(q, cache)[:, 0]).argmax(-1)
        written.append(token)
    return torch.stack(written, 1)


@torch.no_grad()
def anew(model: Model, prompts: list[Tensor], count: int) -> Tensor:
    """The same from whole sequences, run again for every token."""
    texts = list(prompts)
    for _ in range(count):
        for n, text in enumerate(texts):
            out = warploom.attention(*(t[None] for t in model.project(text)), causal=True)
            texts[n] = torch.cat([text, model.logits(out[0, -1:]).argmax(-1)])
    return torch.stack([text[-count:] for text in texts])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tokens", type=int, default=16, help="to write behind each prompt (default: 16)")
    parser.add_argument("--seed", type=int, default=0, help="of weights and prompts (default: 0)")
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default: cpu)")
    options = parser.parse_args()
    if options.tokens < 1:
        parser.error(f"--tokens takes 1 or more, got {options.tokens}")
    if options.device.startswith("cuda") and not torch.cuda.is_available():
        parser.error(f"--device {options.device}: torch sees no CUDA device here")
    torch.manual_seed(options.seed)
    model = Model().to(options.device).double()  # so that both ways agree on the likeliest token
    prompts = [torch.randint(VOCABULARY, (n,), device=options.device) for n in (40, 7, 23)]
    written = serve(model, prompts, options.tokens)
    for prompt, tokens in zip(prompts, written, strict=True):
        print(f"after {len(prompt):2d} tokens: {' '.join(str(token) for token in tokens.tolist())}")
    print(f"the same as whole sequences run anew: {torch.equal(written, anew(model, prompts, options.tokens))}")


if __name__ == "__main__":
    main()
