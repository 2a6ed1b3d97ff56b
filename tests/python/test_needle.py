"""Retrieval from long caches: whether 8 bits find what 16 bits find (docs/numerics.md). With --device cuda 2000 retrievals from
131072 keys, else 200 from 2048; -s prints what was measured."""

import pytest

torch = pytest.importorskip("torch")

from cache_cases import E4M3, I8, INT, stored  # noqa: E402
from fa_attention.torch import paged_attention  # noqa: E402

D, PAGE, DIGITS, BASE = 128, 64, 4, 32
OUTLIERS, SIZE = 4, 12.0  # columns of K, and how far their mean is from 0, in units of the other columns' deviation
NORM = 60.0  # of a query: the best score is then some times the logarithm of the number of keys


class Haystack:
    """Keys of `h_kv` heads, standard normal but for a few columns with a mean; the value of a key are the digits of its number,
    one-hot. Queries are the directions of keys, from the mean of all, with noise: they share one cache."""

    def __init__(self, device, keys, b, h_kv, group):
        generator = torch.Generator().manual_seed(20)
        self.shape = b, h_kv, group
        k = torch.randn(keys, h_kv, D, generator=generator)
        columns = torch.stack([torch.randperm(D, generator=generator)[:OUTLIERS] for _ in range(h_kv)])
        signs = torch.randn(h_kv, OUTLIERS, generator=generator).sign()
        k += torch.zeros(h_kv, D).scatter_(1, columns, SIZE * signs)
        self.needles = torch.randint(keys, (b, h_kv, group), generator=generator)
        heads = torch.arange(h_kv)[:, None].expand(b, h_kv, group)
        directions = (k - k.mean(0))[self.needles, heads]
        self.directions = torch.nn.functional.normalize(directions, dim=-1)
        self.noise = torch.nn.functional.normalize(torch.randn(self.directions.shape, generator=generator), dim=-1)
        self.levels = torch.rand(b, h_kv, group, 1, generator=generator)
        self.digits = torch.arange(keys)[:, None] // BASE ** torch.arange(DIGITS) % BASE
        v = torch.zeros(keys, DIGITS, BASE).scatter_(2, self.digits[:, :, None], 1.0).flatten(1)[:, None].expand(-1, h_kv, -1)
        order = torch.randperm(keys // PAGE, generator=generator)
        pages = [torch.empty(keys // PAGE, PAGE, h_kv, D, dtype=torch.bfloat16) for _ in range(2)]
        for pool, rows in zip(pages, (k, v)):
            pool[order] = rows.unflatten(0, (-1, PAGE)).to(torch.bfloat16)
        self.k, self.v = (t.to(device) for t in pages)
        self.table = order.to(device, INT)[None]
        self.used = torch.full((b,), keys, dtype=INT, device=device)
        self.index = torch.zeros(b, dtype=INT, device=device)

    def queries(self, most):
        """With noise of levels between 0 and `most`, in units of the direction."""
        q = torch.nn.functional.normalize(self.directions + most * self.levels * self.noise, dim=-1) * NORM
        return q.flatten(1, 2)[:, :, None].to(self.k.device, torch.bfloat16)

    def read(self, q, k, v, k_scale=None, v_scale=None):
        """The digits that come out of each retrieval."""
        o = paged_attention(q, k, v, self.table, self.used, batch_index=self.index, k_scale=k_scale, v_scale=v_scale)
        return o.cpu().float().view(*self.shape, DIGITS, BASE).argmax(-1)

    def found(self, digits):
        return (digits == self.digits[self.needles]).all(-1)


def test_caches_of_8_bits_find_what_16_bits_find(device):
    keys, sizes = (131072, (125, 2, 8)) if device == "cuda" else (2048, (25, 1, 8))
    stack = Haystack(device, keys, *sizes)
    for most in torch.arange(1.0, 6.0, 0.05).tolist():
        q = stack.queries(most)
        whole = stack.read(q, stack.k, stack.v)
        found = stack.found(whole)
        share = float(found.float().mean())
        if share <= 0.985:
            break
    report = [f"{found.numel()} retrievals from {keys} keys, noise up to {most:.2f}: bf16 finds {100 * share:.2f} %"]
    agreements = []
    for name, kind in (("e4m3", E4M3), ("i8", I8)):
        digits = stack.read(q, *stored(stack.k, stack.v, (kind, kind)))
        agreements.append(float((stack.found(digits) == found).float().mean()))
        same = float((digits == whole).all(-1).float().mean())
        report.append(f"{name} agrees in {100 * agreements[-1]:.2f} %, with equal readouts in {100 * same:.2f} %")
    print("\n" + "; ".join(report))
    assert 0.90 <= share <= 0.99, report
    assert min(agreements) >= 0.995, report
