"""`npt doctor --products`, and the line that says what bf16 products cost."""

from __future__ import annotations

import json

from npt.cli.main import main


def test_products_are_measured_and_the_page_says_what_auto_takes(capsys) -> None:
    assert (
        main(
            [
                "doctor",
                "--products",
                "--use_quantization",
                "--batch_size",
                "1",
                "--max_length",
                "8",
                "--json",
            ]
        )
        == 0
    )
    found = json.loads(capsys.readouterr().out)["products"]
    assert (found["rows"], found["auto"], set(found["settings"])) == (
        8,
        "highest",
        {"highest", "high"},
    )
    kind = found["settings"]["high"]["down_proj"]
    assert (
        kind["shape"] == [192, 512]
        and 0 < kind["error"] < 1e-6
        and kind["flops_per_second"] == 2 * 8 * 192 * 512 / kind["seconds"]
    )
    assert main(["doctor", "--products", "--batch_size", "1", "--max_length", "8"]) == 0
    out = capsys.readouterr().out
    assert "no faster fp32 product" in out and "auto takes highest" in out
    assert max(map(len, out.splitlines()[2:12])) <= 80


def test_flags_that_products_do_not_heed_are_refused(capsys) -> None:
    assert main(["doctor", "--products", "--adapter_rank", "4"]) == 2
    assert "--adapter_rank means nothing without --plan" in capsys.readouterr().err
    assert main(["doctor", "--products", "--matmul_precision", "high"]) == 2


def test_bf16_products_are_announced_with_their_error_and_recorded(tmp_path, capsys) -> None:
    run = [
        "pretrain",
        "--use_quantization",
        "--init",
        "random",
        "--compute_dtype",
        "bf16",
        "--max_steps",
        "1",
        "--eval_samples",
        "1",
        "--no_smoke_test",
    ]
    assert (
        main(
            [*run, "--max_length", "16", "--batch_size", "1", "--output_dir", str(tmp_path / "run")]
        )
        == 0
    )
    out = capsys.readouterr().out
    assert (
        "--compute_dtype bf16: 4-bit products are rounded to bf16, off by 2.9e-03 of their size"
        in out
    )
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert (
        record["settings"]["compute_dtype"] == "bf16"
        and record["settings"]["matmul_precision"] == "auto"
    )
    assert set(record["precision"]["compute_dtype"]) == {"bfloat16", "float32"}
    assert (
        record["precision"]["matmul_precision"] == "highest"
        and record["product_errors"]["highest"]["up_proj"] > 1e-3
    )
