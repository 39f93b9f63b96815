"""What is refused: one line on standard error that names it, a status, and nothing on disk."""

import shlex
from pathlib import Path

import pytest

import npt
from npt.cli.main import main

# @ is --adapter with one of the embedded model in NF4; a row is the command and words of its line.
REFUSED = """
pretrain --learning_rate -1 => learning_rate | -1
pretrain --adapter_rank 0 => adapter_rank | 0
pretrain --adapter_rank 193 => adapter_rank | 193 | 192
pretrain --layers 6-9 => layers | 9 | 7
pretrain --layers upper => layers | upper | upper_half
pretrain --targets gate,mlp => targets | mlp
pretrain --model_name ./no/such/model => ./no/such/model | model_name
pretrain --dataset_name none.txt => none.txt | dataset_name
pretrain --mult_bound 1 => mult_bound | 1
pretrain --safe_mode --modulation both => safe_mode | both
pretrain --teacher_precision fp32 --no_use_quantization => teacher_precision
pretrain --calibration_tokens 700 --init random => calibration_tokens | 700 | --init calibrated
pretrain --ranks 4,5 => --ranks has 2 ranks (4,5) | 4 layers
pretrain --ranks 4,x => ranks | 4,x
pretrain --ranks 4,4,4,193 => ranks | 193 | 192
pretrain --trace_steps 3-1 => trace_steps | 3-1 | 1-5
pretrain --replay_ratio 0.3 => replay_ratio | 0.3 | replay_dataset
pretrain --replay_dataset none.txt => none.txt
pretrain --shard_base => shard_base | torchrun
pretrain --device_map auto => --device_map: use --shard_base
pretrain --loss mse => --loss | mse | nmse
pretrain --logit_loss jsd => --logit_loss | jsd | reverse_kl
generate @ --prompt x --seed 1 => --seed | no random numbers
replay x --device cpu => --device | NPT_DEVICE=cpu
consolidate @ --undo 0 => --output is missing
consolidate @ --undo first --output x => --undo
consolidate @ --undo 0 --list => --undo
consolidate @ --list --output x => --output
consolidate @ --list --probes 2 => --probes | --list
consolidate @ --list --model_name x => --model_name | --list
consolidate @ --undo 0 --output x --max_kl 1 => --max_kl | --undo
consolidate @ --undo 0 --output x --max_length 9 => --max_length | --undo
consolidate @ --text a --facts f.jsonl --output x => --text | --facts
consolidate @ --facts f.jsonl --output x => f.jsonl
consolidate @ --context f.txt --output x => f.txt
pretrain --completion_column a => completion_column | prompt_column
pretrain --prompt_column q --completion_column a => 'q' | prompt_column
pretrain --residual keep => residual | keep | --teacher_precision
pretrain --max_length 2000 => max_length | 2000 | 1024
pretrain --dataset_split heldout => dataset_split | heldout
pretrain --dataset_split foo => foo | train, heldout
pretrain --dataset_config x => dataset_config | x
pretrain --seed NUMBER => seed | NUMBER
pretrain --logit_kl_weight 1 => logit_kl_weight | end_to_end
evaluate @ --lm_eval a => --lm_eval | npt.student_view
evaluate @ --divergence_prompts -1 => -1
evaluate @ --max_new_tokens 8 => --max_new_tokens 8 has no effect | --divergence_prompts
evaluate @ --use_quantization --divergence_prompts 2 --max_new_tokens 1024 => max_new_tokens | 1024
generate @ --prompt x --top_p 0.5 => there is no flag --top_p: npt generate writes the most likely
generate @ --prompt x --adapter /no/such/folder => /no/such/folder
generate @ --prompt x --use_quantization --max_new_tokens 2000 => max_new_tokens 2000 | 1024
trace --limit 0 => --limit | 0 is not above 0
trace --limit abc => --limit | abc
trace --batches 0 => --batches | 0 is not between 1
trace --batches 0.5 => --batches | invalid positive value: '0.5'
trace --strategy both => --strategy | both | end_to_end
trace --num_samples 3 => --num_samples
trace --strategy local => --strategy local | --adapter
trace --model_name ./no/such => ./no/such | --model_name
trace --dataset_name none.txt => none.txt | --dataset_name
trace --adapter /none => there is no folder /none:
trace @ --no_use_quantization => base
doctor => --data
doctor --dataset_name builtin => --data
doctor --data a.txt --dataset_name b.txt => a.txt | b.txt
doctor --data none.jsonl => none.jsonl | dataset_name
doctor --data --max_length 2000 => 2000 | 1024
doctor --data --model_name ./none => ./none
doctor --data --adapter_rank 4 => --adapter_rank | --plan
doctor --data --batch_size 8 => --batch_size | --plan
doctor --data --shape llama-3.1-8b => --shape | --plan
doctor --plan --shard_base => --shard_base | --processes
doctor --plan --processes 2 => --processes | --shard_base
doctor --plan --measure --shard_base --processes 2 => --measure | --shard_base
doctor --plan --shape gpt => gpt | llama-3.1-8b
doctor --plan --shape cpu-0.2b --model_name tiny => cpu-0.2b | tiny
doctor --plan --layers 40 => 40 | 0 to 7
doctor --plan --measure --device cuda => --device | GPU
doctor --plan --measure --shape cpu-0.2b => --measure | --shape
doctor --plan --safe_mode --modulation multiplicative => --safe_mode | multiplicative
pretrain @ --adapter_rank 4 => --adapter_rank is 4, but --adapter | has 3
pretrain @ --safe_mode => --modulation is additive, but --adapter | has both
pretrain @ --calibration_tokens 512 => --calibration_tokens 512 has no effect | --adapter
collect @ --output x.jsonl --max_length 40 --max_new_tokens 39 => --max_new_tokens | 39 | 40
collect @ --output x.jsonl --max_length 2000 => 2000 | 1024
collect @ --output x.jsonl --dataset_name none.jsonl => none.jsonl
collect @ --output x.jsonl --dataset_name builtin --dataset_split heldout => heldout
doctor --data --max_records 0 => --max_records
doctor --data --num_samples 3 => --num_samples
collect @ --output failures.txt => .jsonl
collect @ --output x.jsonl --packing => --packing
collect @ --output x.jsonl --num_prompts 0 => --num_prompts
trace --any_base => --adapter
consolidate @ --output x => --text
pretrain --any_base => --adapter
pretrain --resume auto => --output_dir
pretrain --adapter . => has no adapter_config.json
generate @ --prompt x --compare --mode teacher => --mode
generate @ => --prompt
pretrain --num_samples NUMBER => --num_samples | NUMBER
pretrain --eval_samples NUMBER => --eval_samples | NUMBER
pretrain --max_steps NUMBER => --max_steps | NUMBER
evaluate @ --eval_samples NUMBER => --eval_samples | NUMBER
evaluate @ --batch_size NUMBER => --batch_size | NUMBER
trace @ --batches NUMBER => --batches | NUMBER
generate @ --prompt x --max_new_tokens NUMBER => --max_new_tokens | NUMBER
collect @ --output x.jsonl --seed NUMBER => --seed | NUMBER
transplant @ --text_from a --text_to b --top NUMBER => --top | NUMBER
transplant @ --text_to b => --text_from | --from_context | --code
transplant @ --text_to b --text_from a --from_context c => --text_from and --from_context | remove
transplant @ --text_to b --from_context c --code d => --from_context and --code | remove
transplant @ --text_to b --text_from a --scale 0 => --scale 0 | no effect | --from_context or --code
transplant @ --text_to b --text_from a --queries c => --queries c | --from_context
transplant @ --text_to b --text_from a --output c => --output c | --from_context or --code
transplant @ --text_to b --code c --queries d => --queries d | --from_context
transplant @ --text_to b --from_context c --token_from 0 => --token_from 0 | --text_from
transplant @ --text_to b --from_context c --output no/c => --output no/c | no does not exist
transplant @ --text_to b --from_context none.txt => --from_context none.txt | No such file
transplant @ --text_to b --from_context . => --from_context . | not a regular file
transplant @ --text_to b --from_context /dev/null => --from_context /dev/null | not a regular file
transplant @ --text_to b --use_quantization --code none => none | not a regular file
transplant @ --text_to b --code => --code
doctor --data builtin --max_records NUMBER => --max_records | NUMBER
doctor --plan --batch_size NUMBER => --batch_size | NUMBER
pretrain --output_dir NAME => NAME
pretrain --resume NAME => NAME
pretrain --adapter NAME => NAME
pretrain --config NAME => NAME
pretrain --model_name ./NAME => NAME
pretrain --dataset_name NAME.jsonl => NAME
evaluate --adapter NAME => NAME
trace --adapter NAME => NAME
replay NAME => NAME
report NAME => NAME
sweep NAME => NAME
export --adapter NAME --output x => NAME
push --adapter NAME --repo_id a/b => NAME
doctor --data NAME.jsonl => NAME
"""
ROWS = dict(line.split(" => ") for line in REFUSED.strip().splitlines())
LONG = {"NUMBER": "9" * 20, "NAME": "x" * 300}
SHORT = "--use_quantization --max_length 32 --batch_size 2 --eval_samples 2"
RANDOM = [*SHORT.split(), "--init", "random"]
pytestmark = pytest.mark.usefixtures("short_library")


@pytest.fixture(scope="module")
def adapter(tmp_path_factory) -> Path:
    """Of a form that no default has."""
    model, _ = npt.load_base("tiny", quantization="nf4", device="cpu")
    npt.attach(model, npt.NPTConfig(rank=3, layers="5,7", targets=("down", "gate")))
    return npt.save_adapter(model, tmp_path_factory.mktemp("adapters") / "first")


@pytest.mark.parametrize("command", ROWS)
def test_what_cannot_be_is_refused_in_one_line_and_leaves_nothing(
    adapter, tmp_path, monkeypatch, capsys, command: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    words, line = ROWS[command].split(" | "), command.replace("@", f"--adapter {adapter}")
    for name, value in LONG.items():
        line = line.replace(name, value)
        words = [word.replace(name, value) for word in words]
    verb, *arguments = shlex.split(line)
    short = [] if verb != "pretrain" else SHORT.split() if "@" in command else RANDOM
    try:
        status = main([verb, *short, *arguments])
    except SystemExit as ended:  # the parser's own
        status = ended.code
    (error,) = [line for line in capsys.readouterr().err.splitlines() if "error: " in line]
    assert status in (2, 5) and [word for word in words if word not in error] == []
    assert list(tmp_path.iterdir()) == []
