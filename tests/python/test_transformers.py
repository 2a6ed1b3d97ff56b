"""Models of transformers with random weights: results, gradients and texts beside `eager`, in fp32 on the host. On a GPU, in bf16,
results and gradients are as near to those of `eager` in fp32 as are those of `eager` in bf16."""

import copy
import itertools
import logging
import warnings

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from fa_attention.transformers import fa_attention_forward, fa_mask, register  # noqa: E402

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


def make_sized(model, config, **more):
    return make(model, config, **{**SIZES, **more})


MODELS = {
    "Llama": lambda: make_sized("LlamaForCausalLM", "LlamaConfig"),
    "GPT-2": lambda: make("GPT2LMHeadModel", "GPT2Config", vocab_size=100, n_embd=64, n_layer=2, n_head=4, bos_token_id=1,
                          eos_token_id=None),
    "Gemma 2": lambda: make_sized("Gemma2ForCausalLM", "Gemma2Config", head_dim=16, sliding_window=4, attn_logit_softcapping=5.0),
    "Qwen 2": lambda: make_sized("Qwen2ForCausalLM", "Qwen2Config"),
    "Mistral": lambda: make_sized("MistralForCausalLM", "MistralConfig", sliding_window=6),
    "gpt-oss": lambda: make_sized("GptOssForCausalLM", "GptOssConfig", head_dim=16, num_local_experts=2, num_experts_per_tok=1,
                                  sliding_window=5),
    "T5": lambda: make("T5ForConditionalGeneration", "T5Config", vocab_size=100, d_model=32, d_kv=8, d_ff=64, num_layers=2,
                       num_heads=4, decoder_start_token_id=0, pad_token_id=0, eos_token_id=None),
}


def use(model, implementation):
    model.set_attn_implementation(implementation)
    for part in model.modules():
        if hasattr(part, "config"):  # in some versions the stacks of T5 have copies
            part.config._attn_implementation = implementation


def run(model, implementation, inputs, weight, output):
    use(model, implementation)
    model.zero_grad()
    result = getattr(model(**inputs), output) * weight
    result.sin().sum().backward()
    return [result.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def make_watched():
    """The name of fa's implementation, and a list of the masks of its calls."""
    name, calls = register("fa_test"), []
    watched = lambda *a, **k: calls.append(a[4]) or fa_attention_forward(*a, **k)  # noqa: E731
    transformers.AttentionInterface.register(name, watched)
    return name, calls


def compare(device, model, inputs, weight=1.0, output="logits"):
    if device != "cpu":
        inputs = {key: value.to(device) for key, value in inputs.items()}
        compare_errors(model.to(device), inputs, weight.to(device) if isinstance(weight, torch.Tensor) else weight, output)
        return None
    name, calls = make_watched()
    expected, actual = (run(model, implementation, inputs, weight, output) for implementation in ("eager", name))
    assert calls, "the implementation is used"
    assert len(actual) == len(expected)
    # Both are rounded at every step: some ten units in the last place of the largest value of the kind.
    scale = max(t.abs().max().item() for t in expected[1:])
    assert torch.allclose(actual[0], expected[0], atol=1e-5 * expected[0].abs().max().item(), rtol=0)
    assert all(torch.allclose(x, y, atol=1e-5 * scale, rtol=0) for x, y in zip(actual[1:], expected[1:]))
    return calls


def compare_errors(model, inputs, weight, output):
    """In bf16, against `eager` in fp32: of results, and of all gradients together. A quarter more is what rounding makes of small
    models."""
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
    compare(device, MODELS["Llama"](), *make_tokens(padding))


@pytest.mark.full
def test_gpt2(device):
    compare(device, MODELS["GPT-2"](), *make_tokens("left"))


@pytest.mark.full
def test_gemma_with_softcap_and_windows(device):
    compare(device, MODELS["Gemma 2"](), *make_tokens("right"))


@pytest.mark.full
def test_qwen(device):
    compare(device, MODELS["Qwen 2"](), *make_tokens("none"))


@pytest.mark.full
def test_gpt_oss_with_sinks(device):
    compare(device, MODELS["gpt-oss"](), *make_tokens("left"))


@pytest.mark.parametrize("padding", list(PADDING))
def test_mistral_with_windows_and_no_mask_of_rows_and_keys(device, padding):
    masks = compare(device, MODELS["Mistral"](), *make_tokens(padding))
    assert masks is None or all(mask.dim() == 2 for mask in masks)


@pytest.mark.full
def test_vit(device):
    model = make("ViTModel", "ViTConfig", hidden_size=48, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
                 image_size=32, patch_size=8)
    compare(device, model, {"pixel_values": torch.randn(2, 3, 32, 32)}, output="last_hidden_state")


@pytest.mark.full
def test_t5_with_its_relative_bias(device):
    inputs, _ = make_tokens("right")
    compare(device, MODELS["T5"](), {**inputs, "decoder_input_ids": inputs["input_ids"][:, :9]})


QUICK = [("Llama", None, "left"), ("Llama", "static", "none"), ("Mistral", None, "left")]
GENERATIONS = [pytest.param(*case, marks=[] if case in QUICK else pytest.mark.full)
               for case in itertools.product(MODELS, (None, "static"), ("left", "none"))]


@pytest.mark.parametrize("name, cache, padding", GENERATIONS)
def test_generation_is_that_of_eager(name, cache, padding):
    model = MODELS[name]()
    inputs, _ = make_tokens(padding)
    texts = []
    own, calls = make_watched()
    for implementation in ("eager", own):
        use(model, implementation)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            texts.append(model.generate(**inputs, max_new_tokens=64, do_sample=False, cache_implementation=cache,
                                        disable_compile=True))
    assert texts[0].shape == (2, 1 + 64 if name == "T5" else 17 + 64)  # of T5 those of the decoder alone
    assert calls, "the implementation is used"
    assert torch.equal(*texts)
    if cache is None and name in ("Llama", "Mistral"):
        assert all(mask is None or mask.dim() == 2 for mask in calls)


@pytest.mark.parametrize("q_offset, q_length, kv_offset, kv_length", [(0, 9, 0, 9), (6, 3, 0, 9), (8, 1, 3, 6), (9, 2, 5, 6)])
@pytest.mark.parametrize("padded", [False, True])
def test_windows_are_those_of_dense_masks(q_offset, q_length, kv_offset, kv_length, padded):
    from transformers import masking_utils as known

    torch.manual_seed(4)
    q, k, v = (torch.randn(2, 4, s, 16) for s in (q_length, kv_length, kv_length))
    padding = torch.ones(2, kv_offset + kv_length, dtype=torch.bool)
    if padded:
        padding[1, :kv_offset + 2] = False
    given = {"batch_size": 2, "q_length": q_length, "kv_length": kv_length, "q_offset": q_offset, "kv_offset": kv_offset,
             "attention_mask": padding, "mask_function": known.sliding_window_causal_mask_function(4), "local_size": 4}
    dense, mask = known.sdpa_mask(**given, allow_is_causal_skip=False), fa_mask(**given)
    assert dense.shape == (2, 1, q_length, kv_length) and mask.shape == (2, kv_length)
    module = torch.nn.Module()
    expected, _ = fa_attention_forward(module, q, k, v, dense)
    for each in (mask, mask.clone()):  # a copy has no attribute
        torch.testing.assert_close(fa_attention_forward(module, q, k, v, each)[0], expected)
    wide = {**given, "mask_function": known.sliding_window_causal_mask_function(kv_length), "attention_mask": None}
    assert fa_mask(**wide) is None
    others = (known.chunked_causal_mask_function(4, torch.zeros(2, dtype=torch.int64)), known.and_masks(known.causal_mask_function),
              known.or_masks(known.sliding_window_overlay(4), known.causal_mask_function),
              known.sliding_window_bidirectional_mask_function(4))
    assert all(fa_mask(**{**given, "mask_function": other}).dim() == 4 for other in others)


def test_invariance_is_that_of_the_registered_name(monkeypatch):
    from fa_attention import transformers as own

    given, attention = [], own.attention
    monkeypatch.setattr(own, "attention", lambda *a, **k: given.append(k["invariance"]) or attention(*a, **k))
    model, results = MODELS["Llama"](), []
    for name in (register(), register("fa_rows", invariance="rows")):
        use(model, name)
        results.append(model(**make_tokens("left")[0]).logits)
    assert given == ["none"] * 2 + ["rows"] * 2
    torch.testing.assert_close(*results)
    with pytest.raises(ValueError, match="invariance is 'columns': accepted are none, batch, rows"):
        register(invariance="columns")


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
