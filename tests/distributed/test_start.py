"""The closed-form start over several processes is that of one, or nothing is changed on any."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from process_work import loaded
from several import several, values
from start_work import all_of_it, started

from npt.calibration.calibrate import share
from npt.distributed.processes import ProcessGroup


@pytest.fixture(scope="module")
def base(llama_folder: Path, load_model: Any) -> str:
    loaded(str(llama_folder))  # here, once for all processes, which are forked
    return str(llama_folder)


def assert_equal(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> None:
    """Not one bit differs."""
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert value.tobytes() == other[name].tobytes(), name


@pytest.fixture(scope="module")
def alone(base: str) -> dict[str, Any]:
    return started(ProcessGroup(), base)


@pytest.mark.parametrize("in_step", [False, True])
@pytest.mark.parametrize(("size", "count"), [(1, 3), (2, 7), (3, 7), (3, 6), (3, 1)])
def test_every_batch_is_one_processs_and_those_in_step_have_equally_many(
    size: int, count: int, in_step: bool
) -> None:
    parts: list[Any] = [f"batch {number}" for number in range(count)]
    shares = [share(parts, ProcessGroup(index, size), in_step) for index in range(size)]
    added = [turn for mine in shares for turn in mine if turn[0] is not None]
    assert sorted(added) == [*enumerate(parts)]
    assert (len({len(mine) for mine in shares}) == 1) == (in_step or count % size == 0)


@pytest.mark.parametrize("size", [2, 3])
def test_processes_share_a_start_and_fail_together(
    size: int, base: str, alone: dict[str, Any], tmp_path: Path
) -> None:
    every = values(several(size, all_of_it, base, str(tmp_path / "run")))
    for process in every:
        assert_equal(process["started"]["state"], every[0]["started"]["state"])
        assert process["started"]["layers"] == every[0]["started"]["layers"]
        assert_equal(process["sharded"]["state"], every[0]["started"]["state"])
        assert process["sharded"]["kl"] == every[0]["started"]["kl"]
        assert_equal(process["begun again"]["state"], every[0]["begun again"]["state"])
        assert process["begun again"]["last"] <= 9
    shared = every[0]["started"]
    # Each batch is drawn for and multiplied as by one process, so C and S differ by the order of
    # sums in fp64 alone. Eigenvectors turn by that over the gap to the next eigenvalue, which has
    # no bound, but neither P A nor what the student makes of it turns with them inside the kept
    # directions. 1e-6 is the rounding of fp32, in which A and B are kept.
    assert shared["tokens"] == alone["tokens"]
    for index, layer in alone["layers"].items():
        assert shared["layers"][index] == pytest.approx(layer, rel=1e-6)
        difference = np.linalg.norm(shared["cuts"][index] - alone["cuts"][index])
        assert difference < 1e-6 * np.linalg.norm(alone["cuts"][index])
    assert shared["kl"] == pytest.approx(alone["kl"], rel=1e-6)

    last = size - 1
    lines = [process["refused"] for process in every]
    nan = "calibration: the state of layer 1 is not finite; find its cause"
    met = [line["nan"].startswith(f"NumericalError: {nan}") for line in lines]
    assert met.count(True) == 1
    for process, line in enumerate(lines):
        if not met[process]:
            owner = met.index(True)
            assert line["nan"].startswith(f"ProcessError: process {owner} failed: {nan}")
        assert every[process]["refused sharded"] == line["nan"]
        memory = "CUDA out of memory. Tried to allocate 2.00 GiB."
        memory = f"{memory}\nMore." if process == last else f"process {last}: {memory}"
        assert line["memory"] == f"OutOfMemoryError: {memory}"
        assert (
            "ConfigError: process 1 has batch_size 9, but process 0 has 8" in line["other settings"]
        )
        assert "process 1 has calibration samples of hash" in line["other data"]
        failed = "" if process else "process 1 failed: "
        kind = "DataError" if process else "ProcessError"
        assert line["too little"].startswith(f"{kind}: {failed}calibration needs two samples")
    assert "the calibration: out of memory with 4 samples" in every[0]["begun again"]["said"]
