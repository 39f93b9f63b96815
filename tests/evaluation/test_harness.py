"""lm-evaluation-harness on views of one model: its scores are those of the views' own logits."""

import json
import math

import pytest
import torch
from students import moved

import npt
from npt.config import NPTConfig
from npt.evaluation.view import mode_view

TEXTS = ("import os\nimport sys\n\ndef main(x):", "for i in range(10):", "if __name__ == 'a':")
TASK = """task: own_text
dataset_path: json
dataset_kwargs: {{data_files: {{test: {0}/texts.jsonl}}, cache_dir: {0}/cache}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{{{text}}}}"
metric_list: [{{metric: byte_perplexity, aggregation: weighted_perplexity}}]
"""


def test_the_scores_are_those_of_the_views_own_logits(tmp_path, monkeypatch) -> None:
    lm_eval = pytest.importorskip("lm_eval", reason="NOT TESTED: lm-evaluation-harness")
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    # its report on the machine starts a dozen programs
    monkeypatch.setattr("lm_eval.evaluator.add_env_info", lambda _results: None)
    lines = [json.dumps({"text": text}) + "\n" for text in TEXTS]
    (tmp_path / "texts.jsonl").write_text("".join(lines), encoding="utf-8")
    (tmp_path / "own.yaml").write_text(TASK.format(tmp_path), encoding="utf-8")
    model, tokenizer = npt.load_base("tiny", quantization="nf4", device="cpu")
    npt.attach(model, NPTConfig(rank=4, layers="3,5"))
    moved(model, 0.2)
    size, perplexities = sum(len(text.encode()) for text in TEXTS), set()
    tasks = TaskManager(include_path=str(tmp_path), include_defaults=False)
    for mode in ("teacher", "floor", "student"):
        view, nats = mode_view(model, mode), 0.0
        harness = HFLM(pretrained=view, tokenizer=tokenizer, batch_size=2)
        ran = lm_eval.simple_evaluate(model=harness, tasks=["own_text"], task_manager=tasks)
        for text in TEXTS:
            # the harness puts a start token before a text, also before the tokenizer's own
            ids = torch.tensor([tokenizer.bos_token_id, *tokenizer(text)["input_ids"]])
            with torch.no_grad():
                rows = view(input_ids=ids[None]).logits[0, :-1].double().log_softmax(-1)
            nats -= float(rows.gather(1, ids[1:, None]).sum())
        score = ran["results"]["own_text"]["byte_perplexity,none"]
        # it rounds nothing but works in fp32 on padded rows
        assert score == pytest.approx(math.exp(nats / size), rel=1e-3)
        perplexities.add(round(score, 3))
    assert len(perplexities) == 3  # three models, not one
