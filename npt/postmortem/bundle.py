"""Reading a post-mortem bundle: everything is checked before anything is made of it.

A bundle may come from somebody else. It is safetensors and JSON, never a pickle; names in it are
compared with names that are known, and lead nowhere on disk.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from torch import Tensor

from npt.config import QUANT_TYPES, NPTConfig, TrainConfig
from npt.data.batch import ROW_TENSORS, Batch, batch_from_tensors, documents_of
from npt.diagnostics.recorder.record import Record
from npt.errors import BundleError, ConfigError
from npt.postmortem.write import ACCEPTED, FORMAT, RECORD_NAME, STATE_NAME, WINDOW_NAME
from npt.random_state import read_random_state
from npt.runs.checkpoint import OPTIMIZER_TENSORS
from npt.step.schedule import kind_of_run, rate_at
from npt.step.window_result import Refusal, Snapshot
from npt.stored import (
    Header,
    check_entries,
    check_names,
    described,
    read_headers,
    read_json,
    read_tensors,
    shown,
)

KINDS = ("data", "loss", "gradient", "norm", "spike", "update")

_RANDOM = "rng."
_OPTIONAL = {f.name for f in fields(Batch) if f.default is None}
_NO_DOCUMENTS = (
    "its rows are packed, and the npt that wrote it left out where their documents end; that is"
    " told from the positions"
)
_NUMBER = (int, float)
_ENTRIES: dict[str, tuple[type, ...]] = {
    "format": (int,),
    "step": (int,),
    "reason": (str,),
    "refusals": (list,),
    "sample_ids": (list,),
    "accepted_sample_ids": (list,),
    "offsets": (list,),
    "accepted_offsets": (list,),
    "history": (list,),
    "counters": (dict,),
    "schedule": (dict,),
    "spike_limits": (list, type(None)),
    "settings": (dict,),
    "base": (dict,),
    "versions": (dict,),
    "device": (str,),
    "base_hash_at_stop": (str, type(None)),
    "precision": (dict, str, type(None)),
    "findings": (dict,),
    "samples_at_once": (int,),
    "micro_batch": (int, type(None)),
    "record": (dict, type(None)),
    "verdict": (dict, type(None)),
    "failures": (dict,),
}
_REFUSAL: dict[str, tuple[type, ...]] = {
    "kind": (str,),
    "detail": (str,),
    "micro_batch": (int, type(None)),
    "sample_ids": (list,),
    "rank": (int,),
}
_SCHEDULE: dict[str, tuple[type, ...]] = {
    "learning_rate": _NUMBER,
    "scheduler_type": (str,),
    "warmup_steps": (int,),
    "total_steps": (int, type(None)),
    "next_rate": _NUMBER,
}
_BASE: dict[str, tuple[type, ...]] = {
    "name": (str,),
    "hash": (str,),
    "quantization": (str, type(None)),
    "dtype": (str,),
    "matmul_precision": (str,),
}
_BASE_CHOICES: dict[str, tuple[Any, ...]] = {
    "quantization": (None, *QUANT_TYPES, "mixed"),
    "dtype": ("float32", "float16", "bfloat16"),
    "matmul_precision": ("highest", "high", "medium"),
}
_FINDINGS: dict[str, tuple[type, ...]] = dict.fromkeys(
    ("adapters", "moments", "base"), (str, type(None))
)

C = TypeVar("C")


@dataclass(frozen=True)
class RecordedBase:
    """The base a run was on. dtype: what it computes in, such as 'float32'; of a packed base, what
    its products do.
    """

    name: str
    hash: str
    quantization: str | None
    dtype: str
    matmul_precision: str


@dataclass(frozen=True)
class Bundle:
    """A bundle whose form has been checked; micro-batches and random state are on the host,
    adapters and moments still on disk.

    step: applied steps behind the state. window: the micro-batches that ended the run. accepted:
    those of the last window of which nothing was refused. rate: learning rate of the window's step.
    samples_at_once: that the run computed of a micro-batch. limits: of the spike guard, None
    without one. headers: of `state.safetensors`. random_state: by `cpu`, `cuda.0` and so on. said:
    `postmortem.json` as it stands. note: what an older bundle lacked and how it was made up for,
    None where nothing was.
    """

    folder: Path
    step: int
    reason: str
    refusals: tuple[Refusal, ...]
    window: tuple[Batch, ...]
    accepted: tuple[Batch, ...]
    adapter_config: NPTConfig
    train_config: TrainConfig
    rate: float
    samples_at_once: int
    limits: tuple[float, float] | None
    base: RecordedBase
    device: str
    headers: Mapping[str, Header]
    random_state: Mapping[str, Tensor]
    said: Mapping[str, Any]
    note: str | None = None

    def kept(self, parameters: Mapping[str, Tensor]) -> Snapshot:
        """Adapters and optimizer state for a model's parameters, which they have to fit exactly.

        Args:
            parameters: the trainable tensors of the model by name.

        Raises:
            BundleError: a tensor is missing, extra, misshapen or of another dtype; it is named.
        """
        path = self.folder / STATE_NAME
        stored = [name for name in self.headers if not name.startswith("rng.")]
        # none before it was ever asked to step
        keys = OPTIMIZER_TENSORS if any(name.startswith("optimizer.") for name in stored) else ()
        wanted = {f"adapter.{name}": tuple(p.shape) for name, p in parameters.items()}
        for name, p in parameters.items():
            wanted |= {
                f"optimizer.{name}.{key}": () if key == "step" else tuple(p.shape) for key in keys
            }
        check_names(path, stored, wanted, BundleError)
        for name, shape in wanted.items():
            if self.headers[name] != ("F32", shape):
                _refuse(
                    path,
                    f"{name} is {described(self.headers[name])}, the model needs F32 {list(shape)}",
                )
        tensors = read_tensors(path, wanted, BundleError)
        return {
            name: (
                tensors[f"adapter.{name}"],
                {key: tensors[f"optimizer.{name}.{key}"] for key in keys},
            )
            for name in parameters
        }


def read_bundle(folder: str | Path) -> Bundle:
    """Read and check everything that can be checked without the base.

    Args:
        folder: as written by `write_postmortem`.

    Raises:
        BundleError: a file is missing, unreadable, or not of the form that is written.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise BundleError(
            f"there is no bundle {folder}; name a folder RUN/postmortem/step-XXXXXXXX"
        )
    for name in (RECORD_NAME, STATE_NAME, WINDOW_NAME):
        if not (folder / name).is_file():
            raise BundleError(
                f"{folder} holds no {name}; name a complete folder RUN/postmortem/step-XXXXXXXX"
            )
    path = folder / RECORD_NAME
    said = read_json(path, BundleError)
    if said.get("format") != FORMAT:
        raise BundleError(
            f"{path} is of format {shown(said.get('format'))}, this version reads {FORMAT}; replay"
            " it with the npt that wrote it"
        )
    # which older bundles do not have
    newer = {"samples_at_once": 1, "offsets": [], "accepted_offsets": []}
    check_entries(path, "", {**newer, **said}, _ENTRIES, BundleError)
    check_entries(path, "schedule.", said["schedule"], _SCHEDULE, BundleError)
    check_entries(path, "base.", said["base"], _BASE, BundleError)
    check_entries(path, "findings.", said["findings"], _FINDINGS, BundleError)
    if not 0 <= said["step"] < 2**63:
        _refuse(path, f"step is {shown(said['step'])}")
    for key, choices in _BASE_CHOICES.items():
        if said["base"][key] not in choices:
            _refuse(
                path,
                f"base.{key} is {shown(said['base'][key])}, expected one of"
                f" {', '.join(map(str, choices))}",
            )
    sample_ids = _sample_ids(path, "sample_ids", said)
    accepted_ids = _sample_ids(path, "accepted_sample_ids", said)
    if not sample_ids or len(accepted_ids) > ACCEPTED:
        _refuse(
            path,
            f"{len(sample_ids)} micro-batches and {len(accepted_ids)} accepted ones are not what a"
            " window leaves",
        )
    if said["micro_batch"] is not None and not 0 <= said["micro_batch"] < len(sample_ids):
        _refuse(path, f"micro_batch is {said['micro_batch']}, the window has {len(sample_ids)}")
    if said["record"] is not None:
        _check_record(path, said["record"])
    places = {str(index): ids for index, ids in enumerate(sample_ids)} | {
        f"accepted.{i}": ids for i, ids in enumerate(accepted_ids)
    }
    batches, note = _batches(folder / WINDOW_NAME, places)
    offsets, accepted_offsets = (
        _offsets(path, "offsets", said, len(sample_ids)),
        _offsets(path, "accepted_offsets", said, len(accepted_ids)),
    )
    train_config = _config(path, TrainConfig, said)
    headers = read_headers(folder / STATE_NAME, BundleError)
    return Bundle(
        folder=folder,
        step=said["step"],
        reason=said["reason"],
        refusals=tuple(_refusal(path, entry, len(sample_ids)) for entry in said["refusals"]),
        window=tuple(
            replace(batches[str(index)], offset=offset) for index, offset in enumerate(offsets)
        ),
        accepted=tuple(
            replace(batches[f"accepted.{index}"], offset=offset)
            for index, offset in enumerate(accepted_offsets)
        ),
        adapter_config=_config(path, NPTConfig, said),
        train_config=train_config,
        rate=_rate(path, said, train_config),
        samples_at_once=_samples_at_once(path, said, train_config),
        limits=_limits(path, said["spike_limits"]),
        base=RecordedBase(**said["base"]),
        device=said["device"],
        headers=headers,
        random_state=_random_state(folder / STATE_NAME, headers),
        said=said,
        note=note,
    )


def _sample_ids(path: Path, key: str, said: Mapping[str, Any]) -> list[tuple[str, ...]]:
    for ids in said[key]:
        if not isinstance(ids, list) or not ids or not all(isinstance(i, str) for i in ids):
            _refuse(path, f"{key} has the entry {shown(ids)}, expected a list of names")
    return [tuple(ids) for ids in said[key]]


def _refusal(path: Path, entry: Any, size: int) -> Refusal:
    if not isinstance(entry, dict):
        _refuse(path, f"refusals has the entry {shown(entry)}, expected an object")
    check_entries(path, "refusals.", entry, _REFUSAL, BundleError)
    index, names = entry["micro_batch"], entry["sample_ids"]
    if entry["kind"] not in KINDS or not all(isinstance(name, str) for name in names):
        _refuse(path, f"refusals has the entry {shown(entry)}; kinds are {', '.join(KINDS)}")
    if index is not None and not 0 <= index < size:
        _refuse(path, f"a refusal is of micro-batch {index}, the window has {size}")
    return Refusal(entry["kind"], entry["detail"], index, tuple(names), entry["rank"])


def _check_record(path: Path, record: dict[str, Any]) -> None:
    try:
        Record.from_dict(record)
    except (KeyError, TypeError, ValueError) as error:
        _refuse(path, f"its record is none: {shown(str(error))}")


def _config(path: Path, cls: type[C], said: Mapping[str, Any]) -> C:
    settings = said["settings"]
    names = [f.name for f in fields(cls)]  # type: ignore[arg-type]
    absent = sorted(set(names) - set(settings))
    if absent:
        version = shown(said["versions"].get("npt"))
        _refuse(
            path,
            f"the setting {absent[0]} is missing; it was written by npt {version}, which can"
            " replay it",
        )
    try:
        return cls(**{name: settings[name] for name in names})
    except (ConfigError, TypeError) as error:
        raise BundleError(f"{path} has a setting that cannot work: {error}") from error


def _rate(path: Path, said: Mapping[str, Any], config: TrainConfig) -> float:
    """The learning rate of the window's step, which settings and schedule have to give as well."""
    found, total, step = said["schedule"], said["schedule"]["total_steps"], said["step"]
    if total is not None and total < 1:
        _refuse(path, f"schedule.total_steps is {total}")
    kind = kind_of_run(config.scheduler_type, total)
    wanted = {
        "learning_rate": config.learning_rate,
        "scheduler_type": kind,
        "warmup_steps": config.warmup_steps,
    }
    for key, value in wanted.items():
        if found[key] != value:
            _refuse(path, f"schedule.{key} is {shown(found[key])}, its settings give {value}")
    rate = rate_at(step, config.learning_rate, kind, config.warmup_steps, total)
    # Not equal to the last bit: another machine's cosine may differ there.
    if not math.isclose(rate, found["next_rate"], rel_tol=1e-9, abs_tol=1e-30):
        _refuse(
            path,
            f"schedule.next_rate is {found['next_rate']}, its schedule gives {rate} at step {step}",
        )
    return float(found["next_rate"])


def _samples_at_once(path: Path, said: Mapping[str, Any], config: TrainConfig) -> int:
    """All of a micro-batch in a bundle that is older than this entry."""
    found: int = said.get("samples_at_once", config.batch_size)
    if found < 1:
        _refuse(path, f"samples_at_once is {shown(found)}, expected a number from 1 on")
    return found


def _limits(path: Path, limits: Sequence[Any] | None) -> tuple[float, float] | None:
    """Of loss and gradient norm; JSON has no word for infinity, so null is one."""
    if limits is None:
        return None
    if len(limits) != 2 or any(
        not (value is None or (isinstance(value, _NUMBER) and not isinstance(value, bool)))
        for value in limits
    ):
        _refuse(path, f"spike_limits is {shown(limits)}, expected two numbers")
    loss, norm = (math.inf if value is None else float(value) for value in limits)
    return loss, norm


def _offsets(path: Path, key: str, said: Mapping[str, Any], count: int) -> list[int]:
    """Of so many micro-batches; 0 in a bundle that is older than this entry."""
    offsets = said.get(key, [0] * count)
    if len(offsets) != count or not all(
        type(offset) is int and 0 <= offset < 2**63 for offset in offsets
    ):
        _refuse(path, f"{key} is {shown(offsets)}, expected {count} numbers from 0 on")
    return list(offsets)


def _batches(
    path: Path, places: Mapping[str, tuple[str, ...]]
) -> tuple[dict[str, Batch], str | None]:
    """The batch at every place, which has the samples that are named; and what had to be made up
    for.
    """
    headers = read_headers(path, BundleError)
    stored = {
        place: [
            name for name in ROW_TENSORS if name not in _OPTIONAL or f"{place}.{name}" in headers
        ]
        for place in places
    }
    check_names(
        path,
        headers,
        [f"{place}.{name}" for place in places for name in stored[place]],
        BundleError,
    )
    for place, sample_ids in places.items():
        shape = headers[f"{place}.input_ids"][1]
        for name in stored[place]:
            header = headers[f"{place}.{name}"]
            if header != ("I64", shape) or len(shape) != 2 or 0 in shape:
                _refuse(
                    path,
                    f"{place}.{name} is {described(header)}, expected I64 [B, T] like input_ids"
                    f" {list(shape)}",
                )
        if shape[0] != len(sample_ids):
            _refuse(
                path,
                f"{place}.input_ids has {shape[0]} rows, but {len(sample_ids)} samples are named",
            )
    tensors = read_tensors(path, headers, BundleError)
    batches, note = {}, None
    for place, sample_ids in places.items():
        parts = {name: tensors[f"{place}.{name}"] for name in stored[place]}
        _check_numbers(path, place, parts)
        if "documents" not in parts:
            documents = documents_of(parts["position_ids"], parts["attention_mask"])
            if documents is not None:
                parts["documents"], note = documents, _NO_DOCUMENTS
        batches[place] = batch_from_tensors(
            parts["input_ids"], parts["attention_mask"], sample_ids
        ).with_rows(parts, sample_ids)
    return batches, note


def _check_numbers(path: Path, place: str, parts: Mapping[str, Tensor]) -> None:
    mask, length = parts["attention_mask"], parts["input_ids"].shape[1]
    if bool(((mask != 0) & (mask != 1)).any()):
        _refuse(path, f"{place}.attention_mask holds numbers other than 0 and 1")
    for name, what in (("position_ids", "positions"), ("documents", "numbers of documents")):
        if name in parts and bool(((parts[name] < 0) | (parts[name] >= length)).any()):
            _refuse(path, f"{place}.{name} holds {what} outside [0, {length})")


def _random_state(path: Path, headers: Mapping[str, Header]) -> dict[str, Tensor]:
    """Of the CPU and of every CUDA device, by `cpu` and `cuda.INDEX`; nothing else may stand beside
    adapters and optimizer.
    """
    for name in headers:
        if not name.startswith(("adapter.", "optimizer.", _RANDOM)):
            _refuse(
                path, f"the tensor {shown(name)}, {described(headers[name])}, is none of a bundle's"
            )
    return read_random_state(path, _RANDOM, headers, BundleError)


def _refuse(path: Path, why: str) -> NoReturn:
    raise BundleError(f"{path}: {why}; the bundle is broken or was changed, copy it again")
