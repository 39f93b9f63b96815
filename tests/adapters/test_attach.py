import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from students import enlarge
from torch import nn
from torch.testing import assert_close
from transformers import (
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForSequenceClassification,
    Phi3Config,
    Phi3ForCausalLM,
)

import npt
from npt.adapters.attach import adapter_shapes
from npt.adapters.converted import adapter_parameters, attached_config, is_attached, npt_layers
from npt.adapters.fit import format_layers, resolve_layers
from npt.errors import ConfigError, ModelError

# A start so large that the student's output lies far from its base's.
STRONG = {"rank": 8, "additive_scale": 1.0}
QUANTIZATIONS = pytest.mark.parametrize("quantization", ["nf4", None])


@torch.no_grad()
def logits(model: nn.Module, batch) -> torch.Tensor:
    return model(
        batch.input_ids, attention_mask=batch.attention_mask, position_ids=batch.position_ids
    ).logits


def structure(model: nn.Module) -> dict:
    """Return all that `attach` may change, the identity of every parameter included."""
    return {
        "classes": [type(m) for m in model.modules()],
        "parameters": [(name, id(p), p.requires_grad) for name, p in model.named_parameters()],
        "state": list(model.state_dict()) if not isinstance(model, nn.Linear) else None,
        "attached": is_attached(model),
        "attributes": sorted(vars(model)),
    }


SMALL = {
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 8,
}


class TestLayerSpec:
    @pytest.mark.parametrize(
        ("spec", "num_layers", "expected"),
        [
            ("all", 3, (0, 1, 2)),
            ("upper_half", 4, (2, 3)),
            ("upper_half", 5, (2, 3, 4)),
            ("upper_half", 1, (0,)),
            ("2", 4, (2,)),
            ("1-3", 4, (1, 2, 3)),
            ("3,1", 4, (1, 3)),
            ("0,2-3", 4, (0, 2, 3)),
            ("1-2,2-3,3", 4, (1, 2, 3)),
            (" 0 , 1 - 2 ", 4, (0, 1, 2)),
        ],
    )
    def test_names_layers(self, spec, num_layers, expected):
        assert resolve_layers(spec, num_layers) == expected

    @settings(deadline=None, max_examples=200)
    @given(st.sets(st.integers(0, 40), min_size=1))
    def test_resolving_what_was_formatted_gives_the_same_layers(self, chosen):
        layers = tuple(sorted(chosen))
        assert resolve_layers(format_layers(layers), 41) == layers

    @pytest.mark.parametrize(
        "spec", ["", "half", "1,,2", "1-", "-1", "1.5", "1-2-3", "1;2", "upper_half,0"]
    )
    def test_refuses_another_form_and_shows_it(self, spec):
        with pytest.raises(ConfigError, match=r"--layers is ") as refusal:
            resolve_layers(spec, 8)
        assert repr(spec) in str(refusal.value)

    def test_refuses_a_range_that_runs_backwards_and_turns_it_round(self):
        with pytest.raises(ConfigError, match=r"range 5-3.*write 3-5"):
            resolve_layers("5-3", 8)


class TestAttach:
    @QUANTIZATIONS
    def test_reports_parameters_before_packing(self, load_model, quantization):
        model = load_model(quantization)
        plain = sum(p.numel() for p in load_model(None).parameters())
        report = npt.attach(model, npt.NPTConfig(layers="0,2-3", rank=4))
        trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
        # A 4x64, B of the stream 64x4, B and M of gate and up 128x4 and of down 64x4
        assert trainable == 3 * (2 * 4 * 64 + 2 * 4 * (128 + 128 + 64))
        assert (report.layers, report.num_layers) == ((0, 2, 3), 4)
        assert (report.trainable_parameters, report.base_parameters) == (trainable, plain)
        assert (
            str(report) == f"converted 3 of 4 layers (0,2-3): {trainable:,} trainable parameters,"
            f" {plain:,} frozen"
        )

    @QUANTIZATIONS
    def test_only_adapters_train_and_the_base_stays_bit_equal(
        self, load_model, batch, quantization
    ):
        model = load_model(quantization)
        before = npt.base_hash(model)
        npt.attach(model, npt.NPTConfig(layers="all", rank=4))
        trained = adapter_parameters(model)
        assert {name for name, p in model.named_parameters() if p.requires_grad} == set(trained)
        start = {name: p.detach().clone() for name, p in trained.items()}
        optimizer = torch.optim.AdamW(trained.values(), lr=1e-2)
        model(
            batch.input_ids, attention_mask=batch.attention_mask
        ).logits.square().mean().backward()
        optimizer.step()
        for name, parameter in model.named_parameters():
            if name in trained:
                assert torch.isfinite(parameter.grad).all(), name
                assert parameter.grad.abs().sum() > 0, name
                assert not torch.equal(parameter, start[name]), name
            else:
                assert parameter.grad is None, name
        assert npt.base_hash(model) == before

    def test_start_depends_on_the_seed_and_the_layer_and_nothing_else(self, load_model):
        def start(seed: int, layers: str) -> dict[str, torch.Tensor]:
            model = load_model(None)
            npt.attach(model, npt.NPTConfig(layers=layers, rank=4), seed=seed)
            return {name: p.detach() for name, p in adapter_parameters(model).items()}

        torch.manual_seed(1)
        state = torch.get_rng_state()
        one = start(5, "1-3")
        assert torch.equal(torch.get_rng_state(), state)
        torch.manual_seed(2)
        alone, other = start(5, "2"), start(6, "2")
        assert all(torch.equal(tensor, one[name]) for name, tensor in alone.items())
        assert not torch.equal(alone["model.layers.2.npt.A"], other["model.layers.2.npt.A"])
        assert not torch.equal(one["model.layers.1.npt.A"], one["model.layers.2.npt.A"])

    @pytest.mark.parametrize(
        ("settings", "message"),
        [
            ({"rank": 65}, r"65.*hidden size 64"),
            ({"layers": "2-9"}, r"layer 9.*0 to 3"),
            ({"layers": "top"}, r"'top'"),
            ({"layers": "0,2-3", "ranks": (3, 8)}, r"2 ranks \(3,8\), but 3 layers"),
            ({"layers": "0,2-3", "ranks": (3, 8, 65)}, r"--ranks is 65, larger than .* 64"),
        ],
    )
    @QUANTIZATIONS
    def test_a_configuration_that_does_not_fit_changes_nothing(
        self, load_model, batch, quantization, settings, message
    ):
        model = load_model(quantization)
        before, output = structure(model), logits(model, batch)
        with pytest.raises(ConfigError, match=message):
            npt.attach(model, npt.NPTConfig(**settings))
        assert structure(model) == before
        assert torch.equal(logits(model, batch), output)

    @pytest.mark.parametrize(
        ("make", "message"),
        [
            (lambda: nn.Linear(2, 2), "Linear has no decoder layers"),
            (
                lambda: Phi3ForCausalLM(Phi3Config(**SMALL, pad_token_id=0)),
                (
                    r"layer 0 is a Phi3DecoderLayer without mlp\.gate_proj, mlp\.up_proj,"
                    r" mlp\.act_fn, which NPT does not support"
                ),
            ),
            (
                lambda: GraniteForCausalLM(GraniteConfig(**SMALL)),
                (
                    "layer 0 is a GraniteDecoderLayer, which may combine its parts"
                    " differently; NPT supports only LlamaDecoderLayer, MistralDecoder"
                ),
            ),
            (
                lambda: LlamaForSequenceClassification(LlamaConfig(**SMALL)),
                "LlamaForSequenceClassification has no lm_head: load it with npt.load_base",
            ),
        ],
    )
    def test_an_unconvertible_model_is_refused_by_name_and_unchanged(self, make, message):
        model = make()
        before = structure(model)
        with pytest.raises(ModelError, match=message):
            npt.attach(model, npt.NPTConfig(layers="all", rank=1))
        assert structure(model) == before


class TestDetach:
    @QUANTIZATIONS
    def test_gives_the_original_back_bit_for_bit(self, load_model, batch, quantization):
        model = load_model(quantization)
        model.lm_head.weight.requires_grad_(True)
        before, output = structure(model), logits(model, batch)
        state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        npt.attach(model, npt.NPTConfig(layers="all", **STRONG))
        enlarge(model, a=15, b=300)
        assert not torch.equal(logits(model, batch), output)
        model(batch.input_ids).logits.sum().backward()
        npt.detach(model)
        assert structure(model) == before
        assert torch.equal(logits(model, batch), output)
        assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())

    def test_without_adapters_does_nothing(self, load_model):
        model = load_model()
        before = structure(model)
        npt.detach(model)
        assert structure(model) == before


class TestModes:
    @QUANTIZATIONS
    def test_the_teacher_is_the_untouched_base_bit_for_bit(self, load_model, batch, quantization):
        base, model = load_model(quantization), load_model(quantization)
        npt.attach(model, npt.NPTConfig(layers="all", **STRONG))
        enlarge(model, a=15, b=300)
        expected, student = logits(base, batch), logits(model, batch)
        assert not torch.allclose(student, expected, atol=0.1)
        with npt.adapters_disabled(model):
            assert torch.equal(logits(model, batch), expected)
            with npt.adapter_mode(model, "student"):
                assert torch.equal(logits(model, batch), student)
                with npt.adapters_disabled(model), npt.adapters_disabled(model):
                    assert torch.equal(logits(model, batch), expected)
                assert torch.equal(logits(model, batch), student)
            assert torch.equal(logits(model, batch), expected)
        assert torch.equal(logits(model, batch), student)

    @QUANTIZATIONS
    def test_the_floor_is_the_base_with_attention_dropped(self, load_model, batch, quantization):
        base, model = load_model(quantization), load_model(quantization)
        npt.attach(model, npt.NPTConfig(layers="1,3", **STRONG))
        enlarge(model, a=15, b=300)
        replaced = []

        def without_attention(layer, args, _kwargs, _output):
            replaced.append(layer)
            hidden = args[0]
            return hidden + layer.mlp(layer.post_attention_layernorm(hidden))

        for index in (1, 3):
            base.model.layers[index].register_forward_hook(without_attention, with_kwargs=True)
        with npt.adapter_mode(model, "floor"):
            # no tolerance: the same operations on the same values
            assert torch.equal(logits(model, batch), logits(base, batch))
        assert len(replaced) == 2

    @QUANTIZATIONS
    def test_a_kept_residual_equals_the_base_at_the_start(self, load_model, batch, quantization):
        base, model = load_model(quantization), load_model(quantization)
        npt.attach(model, npt.NPTConfig(layers="all", residual="keep"))
        # no tolerance: m is exactly 1 and s exactly 0, so every product keeps its bits
        assert torch.equal(logits(model, batch), logits(base, batch))

    def test_a_modulated_residual_starts_near_the_floor_not_the_base(self, load_model, batch):
        model = load_model()
        npt.attach(model, npt.NPTConfig(layers="all"))
        student = logits(model, batch)
        with npt.adapters_disabled(model):
            teacher = logits(model, batch)
        with npt.adapter_mode(model, "floor"):
            floor = logits(model, batch)
        # at padding the state is zero, and normalising the smallest addition makes it large
        valid = batch.attention_mask.bool()
        # the additive start is alpha * B * A ~ 0.1 * 0.001 * 0.02 of an attention output of order
        # one, through four layers
        assert_close(student[valid], floor[valid], rtol=0, atol=1e-2)
        assert (student - teacher)[valid].abs().max() > 1
        assert not torch.equal(student[valid], floor[valid])


def test_a_layer_whose_forward_was_replaced_is_refused_and_left_alone(load_model):
    model = load_model()
    model.model.layers[2].forward = lambda hidden, **context: hidden
    before = structure(model)
    with pytest.raises(ModelError, match="the forward of layer 2 was replaced"):
        npt.attach(model, npt.NPTConfig(layers="1"))
    assert structure(model) == before


def test_each_layer_can_have_a_rank_of_its_own(load_model):
    model = load_model()
    config = npt.NPTConfig(layers="0,2-3", ranks=(3, 8, 64), rank=5)
    npt.attach(model, config)
    assert [tuple(layer.npt.A.shape) for _, layer in npt_layers(model)] == [
        (3, 64),
        (8, 64),
        (64, 64),
    ]
    assert [layer.npt.config.rank for _, layer in npt_layers(model)] == [3, 8, 64]
    assert attached_config(model) == config
    assert {
        name: tuple(p.shape) for name, p in adapter_parameters(model).items()
    } == adapter_shapes(load_model(), config)
