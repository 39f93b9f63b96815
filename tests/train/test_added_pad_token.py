"""Any pad token will do: padding is never looked up."""

import npt


def test_a_pad_token_beyond_the_vocabulary_loses_no_batch(tmp_path) -> None:
    model, tokenizer = npt.load_base("tiny", quantization="nf4")
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    assert tokenizer.pad_token_id >= model.config.vocab_size
    npt.attach(model, npt.NPTConfig(rank=2))
    data = [{"text": "def f(x):\n    return x\n" * (1 + i % 3)} for i in range(8)]
    config = npt.TrainConfig(max_steps=2, batch_size=3, output_dir=str(tmp_path / "run"))
    result = npt.Trainer(model, tokenizer, data, config).train()
    assert (result.steps, result.refused) == (2, 0)
