"""lm-evaluation-harness on a task of one's own: its scores are those of the models' own logits.

Tests that need the extra `eval` are skipped, and reported as skipped, if it is not installed.
With NPT_EXTRAS=eval its absence is a failure.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from students import moved

import npt
from npt.adapters.converted import npt_layers
from npt.cli.main import main
from npt.config import NPTConfig
from npt.errors import ConfigError, DataError, ModelError
from npt.evaluation.harness import find_tasks, lm_eval
from npt.evaluation.view import mode_view

QUESTIONS = [
    {"question": "import os\nimport sys\n\ndef main(", "good": "x):", "bad": "]]"},
    {"question": "for i in range(", "good": "10):", "bad": "}]"},
    {"question": "class Stack:\n    def __init__(self", "good": "):", "bad": "%%"},
    {"question": "if __name__ ==", "good": " '__main__'", "bad": " the"},
    {
        "question": "    def push(self, item):\n        self.",
        "good": "items.append(item)",
        "bad": "the",
    },
]


@pytest.fixture
def the_harness(monkeypatch) -> None:
    """Need the harness, without its report on the machine, which starts a dozen programs."""
    pytest.importorskip(
        "lm_eval",
        reason=(
            "NOT TESTED: lm-evaluation-harness needs the extra `eval` (pip install -e '.[eval]')"
        ),
    )
    monkeypatch.setattr("lm_eval.evaluator.add_env_info", lambda _results: None)


def write_tasks(folder: Path) -> Path:
    data = folder / "questions.jsonl"
    data.write_text(
        "".join(
            json.dumps({**row, "text": row["question"] + row["good"]}) + "\n" for row in QUESTIONS
        ),
        encoding="utf-8",
    )
    source = (
        f"dataset_path: json\ndataset_kwargs:\n  data_files:\n    test: {data}\n  cache_dir:"
        f" {folder / 'cache'}\ntest_split: test\n"
    )
    choice = (
        'output_type: multiple_choice\ndoc_to_text: "{{question}}"\ndoc_to_choice: "{{[good,'
        ' bad]}}"\ndoc_to_target: 0\ntarget_delimiter: ""\nmetric_list:\n  - {metric: acc,'
        " aggregation: mean, higher_is_better: true}\n"
    )
    rolling = (
        'output_type: loglikelihood_rolling\ndoc_to_text: ""\ndoc_to_target:'
        ' "{{text}}"\nmetric_list:\n  - {metric: byte_perplexity, aggregation: weighted_perplexity,'
        " higher_is_better: false}\n"
    )
    tasks = folder / "tasks"
    tasks.mkdir()
    (tasks / "choice.yaml").write_text(f"task: own_choice\n{source}{choice}", encoding="utf-8")
    (tasks / "rolling.yaml").write_text(f"task: own_text\n{source}{rolling}", encoding="utf-8")
    return tasks


@pytest.fixture(scope="module")
def student():
    model, tokenizer = npt.load_base("tiny", quantization="nf4", device="cpu")
    npt.attach(model, NPTConfig(rank=4, layers="3,5"))
    moved(model, 0.2)
    return model, tokenizer


def log_probability(model, ids: list[int], first: int) -> float:
    """Return that of ids[first:] after the others."""
    with torch.no_grad():
        rows = model(input_ids=torch.tensor([ids])).logits[0].double().log_softmax(-1)
    return float(sum(rows[i - 1, ids[i]] for i in range(first, len(ids))))


@pytest.mark.usefixtures("the_harness")
def test_the_scores_are_those_of_the_models_own_logits(student, tmp_path) -> None:
    model, tokenizer = student
    found = lm_eval(
        model, tokenizer, ["own_choice", "own_text"], tasks_path=write_tasks(tmp_path), batch_size=2
    )
    assert list(found) == ["teacher", "floor", "student"]
    perplexities = set()
    for mode, scores in found.items():
        view = mode_view(model, mode)
        right, nats, size = 0, 0.0, 0
        for row in QUESTIONS:
            question = tokenizer(row["question"])["input_ids"]
            # The harness's rule if a token reaches across the seam: the question's own tokens, and
            # those of the whole after as many.
            answers = [
                question + tokenizer(row["question"] + row[kind])["input_ids"][len(question) :]
                for kind in ("good", "bad")
            ]
            good, bad = (log_probability(view, ids, len(question)) for ids in answers)
            right += good > bad
            text = row["question"] + row["good"]
            # The harness puts a start token before a text to have its first token predicted,
            # the tokenizer's own start token too.
            nats -= log_probability(
                view, [tokenizer.bos_token_id, *tokenizer(text)["input_ids"]], 1
            )
            size += len(text.encode())
        assert scores["own_choice"]["acc"] == pytest.approx(right / len(QUESTIONS))
        assert scores["own_choice"]["acc_se"] > 0 or right in (0, len(QUESTIONS))
        assert scores["own_choice"]["samples"] == len(QUESTIONS)
        # The harness rounds nothing but works in fp32 on padded rows.
        assert scores["own_text"]["byte_perplexity"] == pytest.approx(
            math.exp(nats / size), rel=1e-3
        )
        assert math.isnan(scores["own_text"]["byte_perplexity_se"])
        perplexities.add(round(scores["own_text"]["byte_perplexity"], 3))
    assert len(perplexities) == 3  # three models, not one


@pytest.mark.usefixtures("the_harness")
def test_the_model_is_left_as_it_was(student, tmp_path) -> None:
    model, tokenizer = student
    model.train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    random_state = torch.get_rng_state()
    try:
        tasks = write_tasks(tmp_path)
        found = lm_eval(model, tokenizer, ["own_choice"], tasks_path=tasks, limit=2)
        assert {module.training for module in model.modules()} == {True}
    finally:
        model.eval()
    assert found["student"]["own_choice"]["samples"] == 2
    assert {layer.npt.mode for _, layer in npt_layers(model)} == {"student"}
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random_state)


@pytest.mark.usefixtures("the_harness")
def test_what_is_not_there_is_named(student, tmp_path) -> None:
    tasks = write_tasks(tmp_path)
    with pytest.raises(ConfigError, match=r"'absent', which .*tasks does not have"):
        find_tasks(["own_text", "absent"], tasks)
    (tmp_path / "questions.jsonl").unlink()
    with pytest.raises(DataError, match=r"the data of --lm_eval own_text cannot be read"):
        lm_eval(*student, ["own_text"], tasks_path=tasks)


@pytest.mark.usefixtures("the_harness")
def test_the_verb_gives_the_scores(student, short_library, tmp_path, capsys) -> None:
    model, tokenizer = student
    tasks, adapter = write_tasks(tmp_path), npt.save_adapter(model, tmp_path / "adapter")
    arguments = ["evaluate", "--adapter", str(adapter), "--max_length", "32", "--eval_samples", "2"]
    arguments += ["--lm_eval_tasks_path", str(tasks), "--lm_eval_limit", "2"]
    assert main([*arguments, "--lm_eval", "own_choice", "--json"]) == 0
    scores = json.loads(capsys.readouterr().out)["lm_eval"]
    assert scores == lm_eval(model, tokenizer, ["own_choice"], tasks_path=tasks, limit=2)
    assert main([*arguments, "--lm_eval", "own_choice"]) == 0
    out = capsys.readouterr().out
    assert "lm-evaluation-harness" in out and "own_choice" in out


def test_no_task_no_folder_and_no_adapters_are_refused(student, tmp_path) -> None:
    with pytest.raises(ConfigError, match="names no task"):
        lm_eval(*student, [])
    with pytest.raises(ConfigError, match="is no folder"):
        lm_eval(*student, ["own_text"], tasks_path=tmp_path / "absent")
    with pytest.raises(ModelError, match=r"npt\.attach"):
        lm_eval(npt.load_base("tiny", quantization=None, device="cpu")[0], student[1], ["own_text"])
