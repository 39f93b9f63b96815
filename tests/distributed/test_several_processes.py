"""Several processes: they share every window, decide alike, and end together, with the reason, when
one of them cannot continue.
"""

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from process_work import loaded, looped, loops, records, trained
from several import Ended, several, values

from npt.cli.pretrain import pretrain
from npt.distributed.processes import ProcessGroup
from npt.runs.checkpoint import read_checkpoint

GOOD = [[f"good {window} {i}" for i in range(4)] for window in range(3)]

LATE = (True,)

Loops = Callable[..., list[list[list[dict[str, Any]]]]]


@pytest.fixture(scope="module")
def base(llama_folder: Path, load_model: Any) -> str:
    loaded(str(llama_folder))  # here, once for all processes, which are forked
    return str(llama_folder)


@pytest.fixture
def train(base: str, tmp_path: Path) -> Loops:
    """`train(windows, ...)`: for each of these runs what the loop on every process came to, with
    flags read at once and then with flags read one window late, as on a GPU; or LATE only. One
    process is this process itself."""
    made = iter(range(1000))

    def run(
        *runs: Any, size: int = 2, ways: tuple[bool, ...] = (False, True), **settings: Any
    ) -> list[list[list[dict[str, Any]]]]:
        plans = [
            {"out": f"{tmp_path}/loop-{next(made)}", "windows": windows, "late": late, **settings}
            for late in ways
            for windows in runs
        ]
        alone = [loops(ProcessGroup(), base, plans)] if size == 1 else None
        of_processes = alone or values(several(size, loops, base, plans))
        of_plans = [list(plan) for plan in zip(*of_processes, strict=True)]
        return [of_plans[i : i + len(runs)] for i in range(0, len(plans), len(runs))]

    return run


def assert_equal(*states: dict[str, np.ndarray]) -> None:
    """Not one bit differs."""
    for other in states[1:]:
        assert states[0].keys() == other.keys()
        for name, value in states[0].items():
            assert value.tobytes() == other[name].tobytes(), name


def assert_close(one: dict[str, np.ndarray], other: dict[str, np.ndarray], steps: int) -> None:
    """The same but for the order in which gradients were summed: fp32 sums differ by 1e-7 of
    themselves, and Adam divides by the gradient's size, so if it is nearly 0 that may turn a
    step by a good part of the learning rate, 1e-2."""
    for name, value in one.items():
        difference = np.abs(value - other[name])
        assert np.median(difference) < 1e-6 and difference.max() < 1e-3 * steps, (
            name,
            np.median(difference),
            difference.max(),
        )


def refusals(loop: dict[str, Any]) -> list[tuple[int, int, str]]:
    return [
        (e["rank"], e["micro_batch"], e["kind"]) for e in loop["events"] if e["event"] == "refusal"
    ]


def test_two_processes_agree_bit_for_bit_and_with_one_to_rounding(train: Loops) -> None:
    for ((alone,),), (processes,) in zip(train(GOOD, size=1), train(GOOD), strict=True):
        assert_equal(*(process["state"] for process in processes))
        assert_close(alone["state"], processes[0]["state"], steps=3)
        for key in ("steps", "tokens", "micro_batches", "refused"):
            assert alone[key] == processes[0][key] == processes[1][key]
        assert processes[1]["metrics"] == []
        for line, expected in zip(processes[0]["metrics"], alone["metrics"], strict=True):
            for key in ("loss", "loss_nmse", "loss_reg", "grad_norm", "layers.3.nmse", "lr"):
                # fp32 sums in another order
                assert line[key] == pytest.approx(expected[key], rel=1e-5), key


def test_uneven_windows_count_every_micro_batch_once(train: Loops) -> None:
    # in the last one process 1 and process 2 have nothing
    windows = [GOOD[0], GOOD[1][:3], ["good alone"]]
    for ((alone,),), (processes,) in zip(
        train(windows, size=1, ways=LATE), train(windows, size=3, ways=LATE), strict=True
    ):
        assert_equal(*(process["state"] for process in processes))
        assert_close(alone["state"], processes[0]["state"], steps=3)
        assert [process["tokens"] for process in processes] == [alone["tokens"]] * 3
        assert [process["steps"] for process in processes] == [3] * 3


def test_a_bad_micro_batch_on_process_1_leaves_no_trace(train: Loops) -> None:
    kinds = {"nan": "gradient", "inf": "loss", "data": "data", "masked": "data"}
    clean = [GOOD[0][:3]] * len(kinds)
    for processes, never in train(
        [[*window, bad] for window, bad in zip(clean, kinds, strict=True)], clean
    ):
        assert_equal(processes[0]["state"], processes[1]["state"], never[0]["state"])
        assert [process["refused"] for process in processes] == [
            {"gradient": 1, "loss": 1, "data": 2}
        ] * 2
        assert refusals(processes[0]) == [(1, 3, kind) for kind in kinds.values()]
        assert processes[0]["steps"] == 4 and processes[0]["tokens"] == never[0]["tokens"]


def test_a_window_without_survivors_on_any_process_is_no_step(train: Loops) -> None:
    for processes, never in train(
        [GOOD[0], ["nan a", "data", "inf", "masked"], GOOD[1]], [GOOD[0], GOOD[1]], ways=LATE
    ):
        assert_equal(processes[0]["state"], processes[1]["state"], never[0]["state"])
        assert refusals(processes[0]) == [
            (0, 0, "gradient"),
            (1, 1, "data"),
            (0, 2, "loss"),
            (1, 3, "data"),
        ]
        assert [line["lr"] for line in processes[0]["metrics"]] == [
            line["lr"] for line in never[0]["metrics"]
        ]


def test_too_many_refusals_end_all_processes_with_one_bundle(train: Loops, tmp_path: Path) -> None:
    for (processes,) in train([GOOD[0], ["good", "nan a", "nan b", "data"]], max_consecutive_bad=3):
        assert [process["status"] for process in processes] == [3, 3]
        assert all("3 refusals in a row" in process["error"] for process in processes)
    bundles = sorted(tmp_path.glob("loop-*/postmortem/step-*/postmortem.json"))
    assert len(bundles) == 2  # one of either way of reading flags
    for path in bundles:
        bundle = json.loads(path.read_text(encoding="utf-8"))
        ids = [entry["sample_ids"] for entry in bundle["micro_batches"]]
        assert ids == [["good"] * 2, ["nan a"] * 2, ["nan b"] * 2, ["data"] * 2]
        assert [(r["rank"], r["micro_batch"]) for r in bundle["refusals"]] == [
            (1, 1),
            (0, 2),
            (1, 3),
        ]
        seen = [(t["window"], t["micro_batch"]) for t in bundle["history"]]
        assert seen == [(0, 0), (0, 2), (1, 0), (1, 2)]  # of the process that wrote it


def test_an_error_on_process_1_ends_both_in_front_of_its_window(train: Loops) -> None:
    for processes, before in train(
        [GOOD[0], ["good", "good", "good", "raise"], GOOD[2]], [GOOD[0]], ways=LATE
    ):
        assert (
            processes[0]["error"] == "ProcessError: process 1 failed: KeyError: 'a planted error'"
        )
        assert processes[0]["status"] == 1
        assert processes[1]["error"] == "KeyError: 'a planted error'"
        assert_equal(processes[0]["state"], processes[1]["state"], before[0]["state"])
        assert [process["steps"] for process in processes] == [1, 1]


def test_a_signal_to_process_1_stops_both_before_its_window(train: Loops) -> None:
    for processes, before in train(
        [GOOD[0], ["good", "term", "good", "good"], GOOD[2]], [GOOD[0]], ways=LATE
    ):
        assert [process["halts"] for process in processes] == [{1: signal.SIGTERM}] * 2
        assert [process["error"] for process in processes] == [None, None]
        assert_equal(processes[0]["state"], processes[1]["state"], before[0]["state"])
        assert [process["micro_batches"] for process in processes] == [4, 4]


def test_processes_with_other_data_find_out_before_they_step(train: Loops) -> None:
    # other, fewer, more
    others = [
        [GOOD[0], ["good", "another", "good", "good"]],
        [GOOD[0]],
        [GOOD[0], GOOD[1], GOOD[2]],
    ]
    for found in train(*({0: GOOD[:2], 1: other} for other in others), ways=LATE):
        for processes, window in zip(found, (2, 2, 3), strict=True):
            for process in processes:
                assert process["error"].startswith(
                    "ProcessError: process 1 reads different data from process 0 in window"
                    f" {window}"
                )
                assert process["status"] == 2
            assert_equal(processes[0]["state"], processes[1]["state"])


def test_a_step_that_one_process_gets_wrong_is_taken_back_on_both(train: Loops) -> None:
    runs = [[GOOD[0], ["good", "good", "good", fault], GOOD[2]] for fault in ("moment", "weight")]
    for moment, weight, before in train(*runs, [GOOD[0]]):
        for processes, said in ((moment, "is not finite"), (weight, "differs")):
            for process in processes:
                assert (
                    f"the same step, but afterwards the state of process 1 {said}"
                    in process["error"]
                )
                assert process["status"] == 6
            assert_equal(processes[0]["state"], before[0]["state"])


@pytest.mark.parametrize("late", [False, True])
def test_a_process_that_is_killed_is_named_at_once(base: str, tmp_path: Path, late: bool) -> None:
    windows = [GOOD[0], ["good", "kill", "good", "good"]]
    left, killed = several(2, looped, base, str(tmp_path / "run"), windows, late)
    assert killed.status == -signal.SIGKILL
    assert left.value["error"].startswith("ProcessError: process 1 no longer responds (")
    assert left.value["status"] == 6
    # far below the timeout of 20
    assert left.value["steps"] == (0 if late else 1) and left.seconds < 15


def test_a_process_that_hangs_is_named_when_the_time_is_up(base: str, tmp_path: Path) -> None:
    windows = [GOOD[0], ["good", "sleep", "good", "good"]]
    left, slept = several(2, looped, base, str(tmp_path / "run"), windows, timeout=1.0)
    assert "process 1 no longer responds (Timed out" in left.value["error"]
    assert "process 0 no longer responds (" in slept.value["error"]


@pytest.fixture
def run(base: str, tmp_path: Path) -> Callable[..., list[Ended]]:
    """`run(name, size, **config)`: how the processes of a whole run ended."""
    return lambda name, size=2, **config: several(
        size, trained, base, str(tmp_path / name), **config
    )


def test_accumulation_over_processes_sees_every_sample_once(
    base: str, tmp_path: Path, run: Any
) -> None:
    alone, data = (ProcessGroup(), base, str(tmp_path / "alone")), {"count": 16, "batch_size": 1}
    alone = trained(*alone, gradient_accumulation_steps=8, **data)
    several = values(run("several", gradient_accumulation_steps=4, **data))
    seen = several[0]["seen"] + several[1]["seen"]
    assert sorted(seen) == sorted(f"{r['id']}@0" for r in records(16))
    assert several[0]["metrics"] == several[1]["metrics"] and several[1]["said"] == ""
    assert alone["tokens"] == several[0]["tokens"] and alone["steps"] == several[0]["steps"] == 2
    for line, expected in zip(several[0]["metrics"], alone["metrics"], strict=True):
        for key in ("loss", "loss_nmse", "grad_norm", "layers.1.nmse", "layers.3.nmse"):
            # fp32 sums in another order, then steps of Adam
            assert line[key] == pytest.approx(expected[key], rel=1e-4), key
    assert_equal(several[0]["weights"], several[1]["weights"])
    assert_close(alone["weights"], several[0]["weights"], steps=2)
    assert several[0]["fidelity"] == several[1]["fidelity"]


def test_the_logit_loss_is_a_mean_over_all_processes(base: str, tmp_path: Path, run: Any) -> None:
    config = {"strategy": "end_to_end", "logit_kl_weight": 0.5, "count": 8}
    alone = trained(
        ProcessGroup(), base, str(tmp_path / "alone"), gradient_accumulation_steps=4, **config
    )
    several = values(run("several", gradient_accumulation_steps=2, **config))
    assert len(several[0]["metrics"]) == 1
    for line, expected in zip(several[0]["metrics"], alone["metrics"], strict=True):
        # fp32 sums in another order, then steps of Adam
        assert line["loss_kl"] == pytest.approx(expected["loss_kl"], rel=1e-4)


def test_a_save_of_two_processes_resumes_on_two_and_on_one(
    base: str, tmp_path: Path, run: Any
) -> None:
    config = {"gradient_accumulation_steps": 2, "save_steps": 1, "count": 16}
    whole = values(run("whole", **config))
    first = values(run("parts", plant="term", at=2, **config))  # inside the second window
    assert [part["status"] for part in first] == [143, 143] and first[0]["steps"] == 1
    checkpoint = tmp_path / "parts" / "checkpoints" / "step-00000001"
    saved = read_checkpoint(checkpoint)
    assert {name for name in saved.headers if name.startswith("rng.")} == {"rng.0.cpu"}
    of_one = {**config, "gradient_accumulation_steps": 4, "resume": str(checkpoint)}
    alone = trained(ProcessGroup(), base, str(tmp_path / "alone"), **of_one)
    second = values(run("parts", resume=str(tmp_path / "parts"), **config))
    assert_equal(whole[0]["weights"], second[0]["weights"], second[1]["weights"])
    assert [line["loss"] for line in whole[0]["metrics"]] == [
        line["loss"] for line in second[0]["metrics"]
    ]
    for process in (0, 1):
        assert first[process]["seen"][:4] + second[process]["seen"] == whole[process]["seen"]
    assert alone["tokens"] == whole[0]["tokens"] and alone["steps"] == whole[0]["steps"]
    assert_close(alone["weights"], whole[0]["weights"], steps=2)
    (resumed,) = (e for e in alone["events"] if e["event"] == "resume")
    assert resumed["changed"]["processes"] == [2, 1]


@pytest.mark.parametrize("plant", ["raise", "kill"])
def test_process_0_saves_the_last_step_when_process_1_is_lost(
    run: Any, tmp_path: Path, plant: str
) -> None:
    ended = run("run", plant=plant, at=3, gradient_accumulation_steps=1)
    assert ended[0].kind == "ProcessError" and ended[0].status == (1 if plant == "raise" else 6)
    assert "process 1" in str(ended[0].error)
    assert ended[1].kind == ("KeyError" if plant == "raise" else None)
    assert read_checkpoint(tmp_path / "run" / "checkpoints" / "step-00000003").step == 3


def test_processes_with_other_settings_are_refused_by_name(run: Any, tmp_path: Path) -> None:
    ended = run("run", own={1: {"learning_rate": 1e-3}})
    for one in ended:
        assert one.kind == "ConfigError" and one.status == 2
        assert "process 1 has --learning_rate 0.001, but process 0 has 0.01" in str(one.error)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("name", "both", "own"),
    [
        ("resume", None, "auto"),
        ("resume", "auto", None),
        ("resume", "auto", "{}/other"),
        ("output_dir", "{}/run", "{}/other"),
        ("seed", 0, 1),
    ],
    ids=str,
)
def test_processes_that_begin_otherwise_are_refused_before_any_folder(
    run: Any, tmp_path: Path, name: str, both: Any, own: Any
) -> None:
    both, own = (v.format(tmp_path) if isinstance(v, str) else v for v in (both, own))
    ended = run("run", own={0: {name: both}, 1: {name: own}}, timeout=5.0)
    for one in ended:
        assert one.kind == "ConfigError" and one.status == 2 and one.seconds < 5
        words = f"process 1 has --{name} {own}, but process 0 has {both}".replace("None", "unset")
        assert words in str(one.error)
    assert list(tmp_path.iterdir()) == []


def pretrained(processes: ProcessGroup, *flags: dict[str, Any]) -> int:
    return pretrain({"max_steps": 1, **flags[processes.index]})


@pytest.mark.parametrize(
    ("name", "both", "own"),
    [
        ("shard_base", True, False),
        ("use_quantization", False, True),
        ("quant_type", "nf4", "fp4"),
        ("teacher_precision", None, "bf16"),
    ],
)
def test_a_base_that_would_be_loaded_otherwise_is_named_before_it_is_loaded(
    tmp_path: Path, name: str, both: Any, own: Any
) -> None:
    shared = {"output_dir": str(tmp_path / "run"), "use_quantization": True}
    ended = several(2, pretrained, {**shared, name: both}, {**shared, name: own}, timeout=10.0)
    words = f"process 1 has --{name} {own}, but process 0 has {both}".replace("None", "unset")
    for one in ended:
        assert one.kind == "ConfigError" and one.status == 2 and words in str(one.error)
    assert list(tmp_path.iterdir()) == []


def test_a_first_save_that_fails_ends_both(run: Any) -> None:
    ended = run("run", plant="first save", save_steps=2, gradient_accumulation_steps=2)
    assert ended[0].kind == "CheckpointError"
    assert ended[1].kind == "ProcessError"
    assert ended[0].status == ended[1].status == 5
    assert (
        "process 0 failed: cannot write the checkpoint of step 2: [Errno 28] No space left"
        in str(ended[1].error)
    )


def test_weights_that_drift_apart_are_found_before_a_save(run: Any, tmp_path: Path) -> None:
    ended = run("run", plant="weight", at=1, save_steps=2, gradient_accumulation_steps=1)
    for one in ended:
        assert one.kind == "ProcessError" and one.status == 6
        assert "adapters or moments of process 1 differ from those of process 0 at step 2" in str(
            one.error
        )
    assert not list((tmp_path / "run").glob("checkpoints/step-*"))
