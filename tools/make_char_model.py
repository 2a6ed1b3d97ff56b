#!/usr/bin/env python3
"""Trains a small character-level causal transformer with numpy, as examples/decode runs it: rotary embedding, two query heads
for each KV head, RMS norms. Writes its weights in bf16 as tests/data/char_model.safetensors.

Axes: b windows, t positions, h query heads, g KV heads, d head dim, c = h * d width, n = vocabulary.
"""

import argparse
import math
import pathlib
import time

import numpy as np

from make_fixture import (
    ROOT, check_gradients, cross_entropy, rms_norm, rms_norm_backward, rounded, weight_gradient, windows, write_safetensors)

LAYERS, HEADS, KV_HEADS, HEAD_DIM, CONTEXT, HIDDEN, BASE = 2, 4, 2, 32, 128, 256, 10000.0
WIDTH, KV_WIDTH, GROUP = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM, HEADS // KV_HEADS
SCALE = 1.0 / math.sqrt(HEAD_DIM)
MASK = np.triu(np.full((CONTEXT, CONTEXT), -np.inf, np.float32), 1)  # [t, t]
ANGLES = np.arange(CONTEXT)[:, None] * BASE ** (-2.0 * np.arange(HEAD_DIM // 2) / HEAD_DIM)  # [t, d / 2]
COS, SIN = np.cos(ANGLES).astype(np.float32), np.sin(ANGLES).astype(np.float32)


def new_parameters(vocabulary, rng):
    def matrix(rows, columns, gain=1.0):
        return (rng.standard_normal((rows, columns)) * gain / math.sqrt(rows)).astype(np.float32)

    p = {"token": matrix(vocabulary, WIDTH) * np.float32(math.sqrt(vocabulary) / 2), "head": matrix(WIDTH, vocabulary, 0.5),
         "norm": np.ones(WIDTH, np.float32)}
    for layer in range(LAYERS):
        p[f"{layer}.qkv"] = matrix(WIDTH, WIDTH + 2 * KV_WIDTH)
        p[f"{layer}.out"] = matrix(WIDTH, WIDTH, 0.5)
        p[f"{layer}.up"] = matrix(WIDTH, HIDDEN, math.sqrt(2))
        p[f"{layer}.down"] = matrix(HIDDEN, WIDTH, 0.5)
        p[f"{layer}.norm1"] = np.ones(WIDTH, np.float32)
        p[f"{layer}.norm2"] = np.ones(WIDTH, np.float32)
    return p


def split_heads(x):  # [b, t, heads * d] -> [b, heads, t, d]
    return x.reshape(x.shape[0], x.shape[1], -1, HEAD_DIM).transpose(0, 2, 1, 3)


def join_heads(x):  # [b, heads, t, d] -> [b, t, heads * d]
    return x.transpose(0, 2, 1, 3).reshape(x.shape[0], x.shape[2], -1)


def rotate(x, direction=1):  # [b, heads, t, d]: columns i and i + d / 2 are a pair; -1 is the gradient
    x0, x1 = np.split(x, 2, axis=-1)
    sin = direction * SIN
    return np.concatenate([x0 * COS - x1 * sin, x1 * COS + x0 * sin], axis=-1)


def for_groups(x):  # [b, g, t, d] -> [b, h, t, d]
    return np.repeat(x, GROUP, axis=1)


def of_groups(x):  # [b, h, t, d] -> [b, g, t, d], the gradient of for_groups
    return x.reshape(x.shape[0], KV_HEADS, GROUP, *x.shape[2:]).sum(2)


def forward(p, tokens):
    """Logits [b, t, n], and everything that the backward pass needs."""
    x = p["token"][tokens]  # [b, t, c]
    tape = {"tokens": tokens, "layers": []}
    for layer in range(LAYERS):
        x0 = x
        n1, inverse1 = rms_norm(x0, p[f"{layer}.norm1"])
        q, k, v = np.split(n1 @ p[f"{layer}.qkv"], [WIDTH, WIDTH + KV_WIDTH], axis=-1)
        q, k, v = rotate(split_heads(q)), for_groups(rotate(split_heads(k))), for_groups(split_heads(v))  # [b, h, t, d]
        scores = q @ k.swapaxes(-1, -2) * np.float32(SCALE) + MASK
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        joined = join_heads(weights @ v)
        x1 = x0 + joined @ p[f"{layer}.out"]
        n2, inverse2 = rms_norm(x1, p[f"{layer}.norm2"])
        hidden = np.maximum(n2 @ p[f"{layer}.up"], 0)
        x = x1 + hidden @ p[f"{layer}.down"]
        tape["layers"].append((x0, n1, inverse1, q, k, v, weights, joined, x1, n2, inverse2, hidden))
    n, inverse = rms_norm(x, p["norm"])
    tape["final"] = (x, n, inverse)
    return n @ p["head"], tape


def attention_backward(dout, q, k, v, weights):
    dv = weights.swapaxes(-1, -2) @ dout
    dp = dout @ v.swapaxes(-1, -2)
    ds = weights * (dp - np.sum(dp * weights, -1, keepdims=True)) * np.float32(SCALE)
    return ds @ k, ds.swapaxes(-1, -2) @ q, dv


def backward(p, tape, dlogits):
    x, n, inverse = tape["final"]
    g = {"head": weight_gradient(n, dlogits)}
    dx, g["norm"] = rms_norm_backward(dlogits @ p["head"].T, x, p["norm"], inverse)
    for layer in reversed(range(LAYERS)):
        x0, n1, inverse1, q, k, v, weights, joined, x1, n2, inverse2, hidden = tape["layers"][layer]
        g[f"{layer}.down"] = weight_gradient(hidden, dx)
        dhidden = (dx @ p[f"{layer}.down"].T) * (hidden > 0)
        g[f"{layer}.up"] = weight_gradient(n2, dhidden)
        dnorm, g[f"{layer}.norm2"] = rms_norm_backward(dhidden @ p[f"{layer}.up"].T, x1, p[f"{layer}.norm2"], inverse2)
        dx = dx + dnorm
        g[f"{layer}.out"] = weight_gradient(joined, dx)
        dq, dk, dv = attention_backward(split_heads(dx @ p[f"{layer}.out"].T), q, k, v, weights)
        parts = rotate(dq, -1), rotate(of_groups(dk), -1), of_groups(dv)
        dqkv = np.concatenate([join_heads(part) for part in parts], axis=-1)
        g[f"{layer}.qkv"] = weight_gradient(n1, dqkv)
        dnorm, g[f"{layer}.norm1"] = rms_norm_backward(dqkv @ p[f"{layer}.qkv"].T, x0, p[f"{layer}.norm1"], inverse1)
        dx = dx + dnorm
    g["token"] = np.zeros_like(p["token"])
    np.add.at(g["token"], tape["tokens"], dx)
    return g


def train(p, ids, steps, batch, rng):
    mean = {name: np.zeros_like(value) for name, value in p.items()}
    square = {name: np.zeros_like(value) for name, value in p.items()}
    began = time.time()
    for step in range(1, steps + 1):
        tokens, targets = windows(ids, rng.integers(0, len(ids) - CONTEXT, batch), CONTEXT)
        logits, tape = forward(p, tokens)
        loss, dlogits = cross_entropy(logits, targets)
        rate = 3e-3 * min(1.0, step / 20) * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * step / steps)))
        for name, gradient in backward(p, tape, dlogits).items():
            mean[name] += 0.1 * (gradient - mean[name])
            square[name] += 0.01 * (gradient * gradient - square[name])
            update = mean[name] / (1 - 0.9**step) / (np.sqrt(square[name] / (1 - 0.99**step)) + 1e-8)
            p[name] -= np.float32(rate) * update.astype(np.float32)
        if step == 1 or step % 50 == 0:
            print(f"step {step:4d}  loss {loss:.3f}  {time.time() - began:.0f} s", flush=True)
    return loss


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=pathlib.Path, default=ROOT / "tests/data/text.txt")
    parser.add_argument("--output", type=pathlib.Path, default=ROOT / "tests/data/char_model.safetensors")
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()

    text = arguments.text.read_text(encoding="utf-8")
    alphabet = sorted(set(text))
    ids = np.array([alphabet.index(character) for character in text])
    rng = np.random.default_rng(arguments.seed)
    p = new_parameters(len(alphabet), rng)
    check_gradients(p, *windows(ids, [0, 7], CONTEXT), forward, backward)
    print(f"{len(text)} characters, {len(alphabet)} different, {sum(v.size for v in p.values())} parameters")
    loss = train(p, ids, arguments.steps, arguments.batch, rng)
    tensors = {name: ("BF16", rounded(value, "BF16")[0]) for name, value in p.items()}
    tensors["alphabet"] = ("I32", np.array([ord(character) for character in alphabet], np.int32))
    write_safetensors(arguments.output, tensors, {
        "description": f"a character transformer of {LAYERS} layers trained on {arguments.text.name} to {loss:.2f} nats a "
                       "character; matrices [inputs, outputs]; qkv: heads of q, then of k, then of v",
        "heads": str(HEADS), "kv_heads": str(KV_HEADS), "head_dim": str(HEAD_DIM), "rotary_base": repr(BASE)})
    print(f"{arguments.output.name}: {arguments.output.stat().st_size} bytes")


if __name__ == "__main__":
    main()
