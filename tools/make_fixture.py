#!/usr/bin/env python3
"""Trains a small character-level causal transformer with numpy and stores what its attention layers really see.

For every layer, q, k and v of two held-out windows are rounded to a 16-bit dtype and written with the float64
attention output and log-sum-exp of those rounded values, as tests/data/char_transformer_layer<N>[_f16].safetensors.

Axes: b windows, t positions (s_q = s_kv = t), h heads, d head dim, c = h * d width, n = vocabulary.
"""

import argparse
import json
import math
import pathlib
import struct
import time

import numpy as np

ROOT = pathlib.Path(__file__).resolve().parent.parent
LAYERS, HEADS, HEAD_DIM, CONTEXT = 2, 2, 64, 128
WIDTH = HEADS * HEAD_DIM
SCALE = 1.0 / math.sqrt(HEAD_DIM)
MASK = np.triu(np.full((CONTEXT, CONTEXT), -np.inf, np.float32), 1)  # [t, t]


def new_parameters(vocabulary, rng):
    def matrix(rows, columns, gain=1.0):
        return (rng.standard_normal((rows, columns)) * gain / math.sqrt(rows)).astype(np.float32)

    p = {"token": matrix(vocabulary, WIDTH) * 0.5, "position": matrix(CONTEXT, WIDTH) * 0.5,
         "head": matrix(WIDTH, vocabulary), "norm": np.ones(WIDTH, np.float32)}
    for layer in range(LAYERS):
        p[f"{layer}.qkv"] = matrix(WIDTH, 3 * WIDTH)
        p[f"{layer}.out"] = matrix(WIDTH, WIDTH, 0.5)
        p[f"{layer}.up"] = matrix(WIDTH, 4 * WIDTH, math.sqrt(2))
        p[f"{layer}.down"] = matrix(4 * WIDTH, WIDTH, 0.5)
        p[f"{layer}.norm1"] = np.ones(WIDTH, np.float32)
        p[f"{layer}.norm2"] = np.ones(WIDTH, np.float32)
    return p


def rms_norm(x, gain):
    inverse = 1.0 / np.sqrt(np.mean(x * x, -1, keepdims=True) + 1e-5)
    return x * inverse * gain, inverse


def rms_norm_backward(dy, x, gain, inverse):
    dgain = np.sum(dy * x * inverse, axis=(0, 1))
    dn = dy * gain
    return inverse * (dn - x * inverse**2 * np.mean(dn * x, -1, keepdims=True)), dgain


def split_heads(x):  # [b, t, c] -> [b, h, t, d]
    return x.reshape(x.shape[0], x.shape[1], HEADS, HEAD_DIM).transpose(0, 2, 1, 3)


def join_heads(x):  # [b, h, t, d] -> [b, t, c]
    return x.transpose(0, 2, 1, 3).reshape(x.shape[0], x.shape[2], WIDTH)


def forward(p, tokens):
    """Logits [b, t, n] and everything the backward pass needs; tape["qkv"][layer] is what the fixture captures."""
    x = p["token"][tokens] + p["position"]  # [b, t, c]
    tape = {"tokens": tokens, "layers": [], "qkv": []}
    for layer in range(LAYERS):
        x0 = x
        n1, inverse1 = rms_norm(x0, p[f"{layer}.norm1"])
        q, k, v = (split_heads(part) for part in np.split(n1 @ p[f"{layer}.qkv"], 3, axis=-1))  # [b, h, t, d]
        scores = q @ k.swapaxes(-1, -2) * np.float32(SCALE) + MASK  # [b, h, t, t]
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        joined = join_heads(weights @ v)
        x1 = x0 + joined @ p[f"{layer}.out"]
        n2, inverse2 = rms_norm(x1, p[f"{layer}.norm2"])
        hidden = np.maximum(n2 @ p[f"{layer}.up"], 0)  # [b, t, 4c]
        x = x1 + hidden @ p[f"{layer}.down"]
        tape["layers"].append((x0, n1, inverse1, q, k, v, weights, joined, x1, n2, inverse2, hidden))
        tape["qkv"].append((q, k, v))
    n, inverse = rms_norm(x, p["norm"])
    tape["final"] = (x, n, inverse)
    return n @ p["head"], tape


def weight_gradient(x, dy):  # [b, t, i], [b, t, o] -> [i, o]
    return x.reshape(-1, x.shape[-1]).T @ dy.reshape(-1, dy.shape[-1])


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
        gradients = attention_backward(split_heads(dx @ p[f"{layer}.out"].T), q, k, v, weights)
        dqkv = np.concatenate([join_heads(d) for d in gradients], axis=-1)
        g[f"{layer}.qkv"] = weight_gradient(n1, dqkv)
        dnorm, g[f"{layer}.norm1"] = rms_norm_backward(dqkv @ p[f"{layer}.qkv"].T, x0, p[f"{layer}.norm1"], inverse1)
        dx = dx + dnorm
    g["position"] = dx.sum(0)
    g["token"] = np.zeros_like(p["token"])
    np.add.at(g["token"], tape["tokens"], dx)
    return g


def cross_entropy(logits, targets):
    """Mean loss in nats a character, and its gradient [b, t, n]."""
    shifted = logits - logits.max(-1, keepdims=True)
    log_p = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    dlogits = np.exp(log_p)
    picked = (*np.indices(targets.shape), targets)
    dlogits[picked] -= 1
    return -log_p[picked].mean(), (dlogits / targets.size).astype(np.float32)


def windows(ids, starts, context=CONTEXT):
    index = np.asarray(starts)[:, None] + np.arange(context)
    return ids[index], ids[index + 1]


def check_gradients(p, tokens, targets, forward, backward):
    """One finite difference for every parameter tensor, in float64: a wrong backward pass stops here."""
    p = {name: value.astype(np.float64) for name, value in p.items()}
    logits, tape = forward(p, tokens)
    gradients = backward(p, tape, cross_entropy(logits, targets)[1])
    for name, value in p.items():
        at = np.unravel_index(np.argmax(np.abs(gradients[name])), value.shape)
        losses = []
        for step in (1e-4, -1e-4):
            value[at] += step
            losses.append(cross_entropy(forward(p, tokens)[0], targets)[0])
            value[at] -= step
        expected = (losses[0] - losses[1]) / 2e-4
        if abs(expected - gradients[name][at]) > 1e-3 * abs(expected) + 1e-6:
            raise SystemExit(f"gradient of {name}{at}: {gradients[name][at]}, by differences {expected}")


def train(p, ids, held_out, steps, batch, rng):
    mean = {name: np.zeros_like(value) for name, value in p.items()}
    square = {name: np.zeros_like(value) for name, value in p.items()}
    began = time.time()
    for step in range(1, steps + 1):
        tokens, targets = windows(ids, rng.integers(0, len(ids) - CONTEXT, batch))
        logits, tape = forward(p, tokens)
        loss, dlogits = cross_entropy(logits, targets)
        rate = 2e-3 * min(1.0, step / 20) * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * step / steps)))
        for name, gradient in backward(p, tape, dlogits).items():
            mean[name] += 0.1 * (gradient - mean[name])
            square[name] += 0.01 * (gradient * gradient - square[name])
            update = mean[name] / (1 - 0.9**step) / (np.sqrt(square[name] / (1 - 0.99**step)) + 1e-8)
            p[name] -= np.float32(rate) * update.astype(np.float32)
        if step == 1 or step % 25 == 0:
            print(f"step {step:4d}  loss {loss:.3f}  held out {held_out_loss(p, held_out):.3f}  "
                  f"{time.time() - began:.0f} s", flush=True)


def held_out_loss(p, held_out):
    tokens, targets = windows(held_out, range(0, len(held_out) - CONTEXT, CONTEXT))
    return cross_entropy(forward(p, tokens)[0], targets)[0]


def to_bf16_bits(x):  # round to nearest even; the inputs are finite
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def rounded(x, dtype):
    """The stored bits, and their values in float64."""
    if dtype == "F16":
        half = np.ascontiguousarray(x, np.float16)
        return half.view(np.uint16), half.astype(np.float64)
    bits = to_bf16_bits(x)
    return bits, (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def attention_f64(q, k, v):
    """O [b, h, t, d] and LSE [b, h, t] of causal attention."""
    scores = q @ k.swapaxes(-1, -2) * SCALE + MASK.astype(np.float64)
    top = scores.max(-1, keepdims=True)
    weights = np.exp(scores - top)
    total = weights.sum(-1, keepdims=True)
    return weights @ v / total, (top + np.log(total))[..., 0]


def write_safetensors(path, tensors, metadata):
    """tensors: name -> (dtype, array); 8-byte elements first, so that every tensor is aligned."""
    header, offset, blobs = {"__metadata__": metadata}, 0, []
    for name, (dtype, array) in sorted(tensors.items(), key=lambda item: (-item[1][1].itemsize, item[0])):
        blob = np.ascontiguousarray(array).tobytes()
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [offset, offset + len(blob)]}
        offset += len(blob)
        blobs.append(blob)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(blobs))


def store_layer(path, qkv, dtype, layer):
    stored = {name: rounded(tensor, dtype) for name, tensor in zip("qkv", qkv)}
    o, lse = attention_f64(*(stored[name][1] for name in "qkv"))
    tensors = {name: (dtype, bits) for name, (bits, _) in stored.items()}
    tensors |= {"expected_o": ("F64", o), "expected_lse": ("F64", lse)}
    write_safetensors(path, tensors, {
        "causal": "true", "scale": repr(SCALE), "dtype": dtype.lower(),
        "description": f"attention inputs of layer {layer} of a trained character transformer on held-out text, and "
                       "the float64 output and natural-log log-sum-exp of exactly these inputs; axes [b, h, s, d]"})
    peak = np.exp((stored["q"][1] @ stored["k"][1].swapaxes(-1, -2) * SCALE + MASK) - lse[..., None]).max(-1).mean()
    print(f"{path.name}: {path.stat().st_size} bytes, mean largest attention weight {peak:.2f}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=pathlib.Path, default=ROOT / "tests/data/text.txt")
    parser.add_argument("--output", type=pathlib.Path, default=ROOT / "tests/data")
    parser.add_argument("--steps", type=int, default=450)
    parser.add_argument("--batch", type=int, default=12)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()

    text = arguments.text.read_text(encoding="utf-8")
    alphabet = sorted(set(text))
    ids = np.array([alphabet.index(character) for character in text])
    border = len(ids) * 9 // 10
    held_out = ids[border:]
    rng = np.random.default_rng(arguments.seed)
    p = new_parameters(len(alphabet), rng)
    check_gradients(p, *windows(ids, [0, 7]), forward, backward)
    print(f"{len(text)} characters, {len(alphabet)} different, {sum(v.size for v in p.values())} parameters; "
          f"a uniform guess costs {math.log(len(alphabet)):.3f}")
    train(p, ids[:border], held_out, arguments.steps, arguments.batch, rng)
    print(f"final held-out loss {held_out_loss(p, held_out):.3f} nats a character")

    tokens, _ = windows(held_out, [0, len(held_out) - CONTEXT - 1])
    _, tape = forward(p, tokens)
    for layer, qkv in enumerate(tape["qkv"]):
        store_layer(arguments.output / f"char_transformer_layer{layer}.safetensors", qkv, "BF16", layer)
        store_layer(arguments.output / f"char_transformer_layer{layer}_f16.safetensors", qkv, "F16", layer)


if __name__ == "__main__":
    main()
