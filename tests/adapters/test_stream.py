import pytest
import torch
from torch.testing import assert_close

import npt
from npt.adapters.stream import open_stream
from npt.data.batch import Batch, batch_from_tensors

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
    npt.attach(model, npt.NPTConfig(layers="1-2", rank=8, init_std_a=0.3, init_std_b=0.3, additive_scale=1.0))
    return model


@torch.no_grad()
@pytest.mark.parametrize("mode", ["student", "teacher"])
@pytest.mark.parametrize("padding", MASKS)
def test_layers_walked_by_hand_equal_the_model_itself(model, padding, mode):
    batch = padded(padding)
    with npt.adapter_mode(model, mode):
        expected = model(
            batch.input_ids, attention_mask=batch.attention_mask, position_ids=batch.position_ids, output_hidden_states=True
        ).hidden_states
        stream = open_stream(model, batch)
        states = [stream.hidden]
        for layer in model.model.layers:
            states.append(stream.clean(layer(states[-1], **stream.context)))
    assert len(expected) == len(states)
    states[-1] = model.model.norm(states[-1])
    for got, wanted in zip(states, expected, strict=True):
        if batch.padded:
            # default tolerance of fp32: valid tokens see the same keys; only what stands at padding differs
            assert_close(stream.rows(got), stream.rows(wanted))
        else:
            assert torch.equal(got, wanted)  # no tolerance: the same operations on the same values


@torch.no_grad()
@pytest.mark.parametrize("padding", MASKS)
def test_the_context_is_the_one_that_the_model_hands_to_its_layers(model, padding):
    batch, calls = padded(padding), []
    hook = model.model.layers[0].register_forward_pre_hook(lambda _, __, kwargs: calls.append(kwargs), with_kwargs=True)
    model(batch.input_ids, attention_mask=batch.attention_mask if batch.padded else None, position_ids=batch.position_ids, use_cache=False)
    hook.remove()
    context = open_stream(model, batch).context
    for name in ("attention_mask", "position_ids", "position_embeddings"):
        assert_close(context[name], calls[0][name], rtol=0, atol=0)  # no tolerance: made by the same functions
    assert (context["past_key_values"], context["use_cache"]) == (calls[0]["past_key_values"], calls[0]["use_cache"]) == (None, False)


def test_an_unpadded_batch_needs_no_mask_and_is_returned_as_it_is(model):
    stream = open_stream(model, padded("none"))
    states = torch.randn(2, 6, 3)
    assert stream.clean(states) is states
    assert stream.context["attention_mask"] is None
    assert stream.hidden.dtype == torch.float32


@pytest.mark.parametrize("padding", ["right", "left", "both"])
def test_clean_zeroes_padding_whatever_stood_there(model, padding):
    batch = padded(padding)
    stream = open_stream(model, batch)
    states = torch.randn(2, 6, 3)
    poisoned = torch.where(batch.attention_mask.bool().unsqueeze(-1), states, torch.tensor([float("nan"), float("inf"), -1.0]))
    expected = states * batch.attention_mask.unsqueeze(-1)
    assert torch.equal(stream.clean(poisoned), expected)
    assert torch.equal(stream.hidden, stream.clean(stream.hidden))


@pytest.mark.parametrize("padding", MASKS)
def test_rows_and_scatter_are_inverse_at_valid_tokens(model, padding):
    batch = padded(padding)
    stream = open_stream(model, batch)
    states = torch.randn(2, 6, 3)
    rows = stream.rows(states)
    assert rows.shape == (batch.tokens, 3)
    assert torch.equal(rows, states[batch.attention_mask.bool()])
    assert torch.equal(stream.scatter(rows), stream.clean(states))


def test_gradients_pass_through_rows_and_scatter(model):
    batch = padded("both")
    stream = open_stream(model, batch)
    states = torch.randn(2, 6, 3, requires_grad=True)
    weight = torch.randn(2, 6, 3)
    (stream.scatter(stream.rows(states)) * weight).sum().backward()
    assert torch.equal(states.grad, weight * batch.attention_mask.unsqueeze(-1))
