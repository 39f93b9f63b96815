import pytest
import torch
from students import enlarge
from torch.testing import assert_close

import npt
from npt.adapters.stream import model_inputs, open_stream
from npt.base.attention import SDPA
from npt.batch import Batch, Sample, batch_from_tensors, collate
from npt.data.packing import pack
from npt.errors import ModelError

MASKS = {
    "none": [[1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]],
    "right": [[1, 1, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0]],
    "left": [[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]],
    "both": [[0, 0, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0]],
}


def padded(padding: str) -> Batch:
    mask = torch.tensor(MASKS[padding])
    ids = torch.randint(3, 128, mask.shape, generator=torch.Generator().manual_seed(4))
    return batch_from_tensors(torch.where(mask.bool(), ids, 2), mask)


@pytest.fixture(scope="module", params=["nf4", None])
def model(request, load_model):
    """Converted in the middle, and far from its base."""
    model = load_model(request.param)
    npt.attach(model, npt.NPTConfig(layers="1-2", rank=8, additive_scale=1.0))
    enlarge(model, a=15, b=300)
    return model


@torch.no_grad()
@pytest.mark.parametrize("mode", ["student", "teacher"])
@pytest.mark.parametrize("padding", MASKS)
def test_layers_walked_by_hand_equal_the_model_itself(model, padding, mode):
    batch = padded(padding)
    with npt.adapter_mode(model, mode):
        expected = model(
            batch.input_ids,
            attention_mask=batch.attention_mask,
            position_ids=batch.position_ids,
            output_hidden_states=True,
        ).hidden_states
        stream = open_stream(model, batch)
        states = [stream.hidden]
        for layer in model.model.layers:
            states.append(stream.clean(layer(states[-1], **stream.context_of(layer))))
    assert len(expected) == len(states)
    states[-1] = model.model.norm(states[-1])
    for got, wanted in zip(states, expected, strict=True):
        if batch.padded:
            # default tolerance of fp32: valid tokens see the same keys; only padding differs
            assert_close(stream.rows(got), stream.rows(wanted))
        else:
            assert torch.equal(got, wanted)  # no tolerance: the same operations on the same values


LENGTHS = (9, 4, 1, 7, 2, 3)


def documents() -> list[Sample]:
    generator = torch.Generator().manual_seed(6)
    return [
        Sample(str(i), tuple(torch.randint(3, 128, (n,), generator=generator).tolist()))
        for i, n in enumerate(LENGTHS)
    ]


def packed(side: str, extra: int = 0) -> Batch:
    """The documents in rows of up to 13 tokens, which some of them do not fill."""
    return collate(pack(documents(), 13), 2, side=side, length=13 + extra)


@pytest.fixture(params=[SDPA, "sdpa", "eager"])
def attention(request, model):
    before = model.config._attn_implementation
    model.config._attn_implementation = request.param
    yield request.param
    model.config._attn_implementation = before


def walked(model, batch: Batch) -> list[torch.Tensor]:
    """Return the valid rows before every layer and after the last."""
    stream = open_stream(model, batch)
    states = [stream.hidden]
    for layer in model.model.layers:
        states.append(stream.clean(layer(states[-1], **stream.context_of(layer))))
    return [stream.rows(state) for state in states]


@torch.no_grad()
@pytest.mark.parametrize("mode", ["student", "teacher"])
@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("extra", [0, 3])
def test_a_packed_token_has_the_state_of_one_in_a_row_of_its_own(
    model, attention, mode, side, extra
):
    batch = packed(side, extra)
    assert batch.documents is not None and len(batch.input_ids) == 2
    place = {
        name: i
        for i, name in enumerate(name for row in batch.sample_ids for name in row.split("+"))
    }
    with npt.adapter_mode(model, mode):
        together = walked(model, batch)
        alone = [
            walked(model, collate([document], 2))
            for document in sorted(documents(), key=lambda d: place[d.id])
        ]
    for layer, states in enumerate(together):
        expected = torch.cat([document[layer] for document in alone])
        # The same keys, but products of other shapes, which sum in another order: a few units of
        # 2^-24 of the largest entry, grown through four layers.
        assert_close(states, expected, rtol=0, atol=2e-5 * float(expected.abs().max()))


@torch.no_grad()
@pytest.mark.parametrize("side", ["right", "left"])
def test_packed_rows_in_the_models_forward_equal_those_by_hand(model, attention, side):
    batch = packed(side)
    expected = model.model.norm(walked(model, batch)[-1])
    states = model.model(**model_inputs(model, batch), use_cache=False).last_hidden_state
    # default tolerance of fp32: padded rows, whose states differ, are in the same matrix products
    assert_close(states.flatten(0, 1)[batch.valid_index], expected)


def test_an_attention_that_would_mix_documents_is_refused(model, monkeypatch):
    monkeypatch.setattr(model.config, "_attn_implementation_internal", "flash_attention_2")
    with pytest.raises(
        ModelError,
        match=(
            "with attn_implementation flash_attention_2: load the base with --attn_implementation"
            " sdpa or eager"
        ),
    ):
        open_stream(model, packed("right"))
