"""What became of the records that were read, in words."""

from __future__ import annotations

from collections.abc import Mapping

from npt.data.encoding import AFTER, RecordCounts
from npt.errors import DataError


def lost(counts: RecordCounts) -> str:
    """Return what was cut or left out, in words; empty if nothing was."""
    cut = {"prompts": counts.cut_prompts, "completions": counts.cut_completions}
    parts = [f"{count:,} {what} cut to --max_length" for what, count in cut.items() if count]
    parts += [f"{counts.noted[AFTER]:,} {AFTER}"] if counts.noted[AFTER] else []
    parts += [f"{count:,} skipped ({why})" for why, count in sorted(counts.skipped.items())]
    return ", ".join(parts)


def listed_columns(unused: Mapping[str, int]) -> str:
    """Return unused columns in words, each with the number of records that have it."""
    return ", ".join(f"{name!r} of {count:,} records" for name, count in sorted(unused.items()))


def no_sample(counts: RecordCounts) -> DataError:
    """Return the error of data that gave nothing but `counts`."""
    held = f"{counts.samples:,} held out" if counts.samples else ""
    reasons = ", ".join(filter(None, (held, lost(counts))))
    of = f" of {counts.records:,} records ({reasons})" if reasons else " of the data"
    return DataError(
        f"no sample to train on came{of}; check --dataset_name and the columns (--text_column,"
        " --prompt_column)"
    )
