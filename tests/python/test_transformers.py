"""Models of transformers with random weights: results, gradients and texts beside `eager`, in fp32 on the host. On a GPU, in bf16,
results and gradients are as near to those of `eager` in fp32 as are those of `eager` in bf16."""

import copy
import logging
import warnings

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from fa_attention.transformers import fa_attention_forward, register  # noqa: E402

transformers.logging.set_verbosity_error()
logging.getLogger("transformers").setLevel(logging.ERROR)
SIZES = {"vocab_size": 100, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "max_position_embeddings": 128, "bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0}
PADDING = {"none": (), "left": (0, slice(0, 5)), "right": (1, slice(11, 17))}


def make(model, config, **sizes):
    torch.manual_seed(0)
    config = getattr(transformers, config)(**sizes)
    config._attn_implementation = "eager"
    return getattr(transformers, model)(config).eval()


def run(model, implementation, inputs, weight, output):
    model.set_attn_implementation(implementation)
    for part in model.modules():
        if hasattr(part, "config"):  # in some versions the stacks of T5 have copies
            part.config._attn_implementation = implementation
    model.zero_grad()
    result = getattr(model(**inputs), output) * weight
    result.sin().sum().backward()
    return [result.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def make_watched():
    """The name of fa's implementation, and a list that grows with its calls."""
    name, calls = register("fa_test"), []
    transformers.AttentionInterface.register(name, lambda *a, **k: calls.append(1) or fa_attention_forward(*a, **k))
    return name, calls


def compare(device, model, inputs, weight=1.0, output="logits"):
    if device != "cpu":
        inputs = {key: value.to(device) for key, value in inputs.items()}
        compare_errors(model.to(device), inputs, weight.to(device) if isinstance(weight, torch.Tensor) else weight, output)
        return
    name, calls = make_watched()
    expected, actual = (run(model, implementation, inputs, weight, output) for implementation in ("eager", name))
    assert calls, "the implementation is used"
    assert len(actual) == len(expected)
    # Both are rounded at every step: some ten units in the last place of the largest value of the kind.
    scale = max(t.abs().max().item() for t in expected[1:])
    assert torch.allclose(actual[0], expected[0], atol=1e-5 * expected[0].abs().max().item(), rtol=0)
    assert all(torch.allclose(x, y, atol=1e-5 * scale, rtol=0) for x, y in zip(actual[1:], expected[1:]))


def compare_errors(model, inputs, weight, output):
    """In bf16, against `eager` in fp32: of results, and of all gradients together. A quarter more is what rounding makes of small models."""
    name, calls = make_watched()
    rounded = copy.deepcopy(model).bfloat16()
    model.load_state_dict({key: value.float() for key, value in rounded.state_dict().items()})  # the same weights
    halves = {key: value.bfloat16() if value.is_floating_point() else value for key, value in inputs.items()}
    expected = run(model, "eager", inputs, weight, output)
    errors = {}
    for implementation in ("eager", name):
        actual = run(rounded, implementation, halves, weight, output)
        assert len(actual) == len(expected) and all(t.isfinite().all() for t in actual)
        squares = [(x.float() - y).square().sum().item() for x, y in zip(actual, expected)]
        errors[implementation] = squares[0] ** 0.5, sum(squares[1:]) ** 0.5
    assert calls, "the implementation is used"
    print(f"errors of result and gradients: {errors}")
    for own, eager in zip(errors[name], errors["eager"]):
        assert own <= 1.25 * eager, errors


def make_tokens(padding):
    torch.manual_seed(1)
    inputs = {"input_ids": torch.randint(2, 100, (2, 17)), "attention_mask": torch.ones(2, 17, dtype=torch.int64)}
    if padding != "none":
        inputs["attention_mask"][PADDING[padding]] = 0
    return inputs, inputs["attention_mask"][..., None].float()  # what padding computes is nobody's matter


@pytest.mark.parametrize("padding", list(PADDING))
def test_llama(device, padding):
    compare(device, make("LlamaForCausalLM", "LlamaConfig", **SIZES), *make_tokens(padding))


@pytest.mark.full
def test_gpt2(device):
    model = make("GPT2LMHeadModel", "GPT2Config", vocab_size=100, n_embd=64, n_layer=2, n_head=4, bos_token_id=1,
                 eos_token_id=None)
    compare(device, model, *make_tokens("left"))


@pytest.mark.full
def test_gemma_with_softcap_and_windows(device):
    model = make("Gemma2ForCausalLM", "Gemma2Config", **SIZES, head_dim=16, sliding_window=4, attn_logit_softcapping=5.0)
    compare(device, model, *make_tokens("right"))


@pytest.mark.full
def test_qwen(device):
    compare(device, make("Qwen2ForCausalLM", "Qwen2Config", **SIZES), *make_tokens("none"))


@pytest.mark.full
def test_gpt_oss_with_sinks(device):
    model = make("GptOssForCausalLM", "GptOssConfig", **SIZES, head_dim=16, num_local_experts=2, num_experts_per_tok=1,
                 sliding_window=5)
    compare(device, model, *make_tokens("left"))


@pytest.mark.full
def test_vit(device):
    model = make("ViTModel", "ViTConfig", hidden_size=48, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
                 image_size=32, patch_size=8)
    compare(device, model, {"pixel_values": torch.randn(2, 3, 32, 32)}, output="last_hidden_state")


@pytest.mark.full
def test_t5_with_its_relative_bias(device):
    model = make("T5ForConditionalGeneration", "T5Config", vocab_size=100, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4,
                 decoder_start_token_id=0)
    inputs, _ = make_tokens("right")
    compare(device, model, {**inputs, "decoder_input_ids": inputs["input_ids"][:, :9]})


@pytest.mark.parametrize("cache", [None, pytest.param("static", marks=pytest.mark.full)])
def test_generation_is_that_of_eager(cache):
    model = make("LlamaForCausalLM", "LlamaConfig", **SIZES)
    inputs, _ = make_tokens("left")
    texts = []
    for implementation in ("eager", register()):
        model.set_attn_implementation(implementation)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            texts.append(model.generate(**inputs, max_new_tokens=64, do_sample=False, cache_implementation=cache,
                                        disable_compile=True))
    assert texts[0].shape == (2, 17 + 64) and torch.equal(*texts)


@pytest.mark.full
def test_training_with_dropout_repeats_with_a_seed():
    model = make("LlamaForCausalLM", "LlamaConfig", **SIZES, attention_dropout=0.3).train()
    model.set_attn_implementation(register())
    inputs, _ = make_tokens("left")
    losses = []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        losses.append(model(**inputs, labels=inputs["input_ids"]).loss.item())
    assert losses[0] == losses[1] != losses[2]
