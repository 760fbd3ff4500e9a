"""Command lines that are refused in one line, which names the option or the file and says what to do about it."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from commands import Refused

REFUSED = {
    # Options of any command.
    "": "no command was given … et --help",
    "tarin": "unknown command tarin … did you mean train?",
    "xyz": "unknown command xyz … choose from train, plan, generate",
    "train --eval_every 3": "unknown option --eval_every … did you mean --eval-every?",
    "train --zzzzzz 3": "unknown option --zzzzzz … see et train --help",
    "train --steps": "--steps: expected one argument … see et train --help",
    "generate . --prompt -x": "--prompt: expected one argument; write --prompt=VALUE for a value that starts with -",
    "train --no-rule.debias=yes": "--rule.debias … ignored explicit argument 'yes'",
    "train --nope": "unknown option --nope; see et train --help",  # not close to --p
    "train -steps 3": "unknown option -steps … did you mean --steps?",
    "train --rule expert_treshold": "--rule: expected dense … not expert_treshold; did you mean expert_threshold?",
    "train --num-experts 8 --rule.num-experts 4": "--num-experts and --rule.num-experts set the same option",
    "plan --experts-per-token 40": "rule.experts_per_token=40.0 must be above 0 and at most rule.num_experts=16",
    "train tiny d12": "unexpected d12 … see et train --help",
    "train --rule token_choice --rule.pool batch": "pool … token_choice … expert_choice or expert_threshold",
    "train --rule token_choice --experts-per-token 1.5": "rule.experts_per_token: expected a whole number … not 1.5",
    "train --config missing.json": "--config missing.json … No such file",
    **dict.fromkeys(
        [f"{command} missing" for command in ("train --resume", "train --init-from", "evaluate", "generate", "serve")]
        + [f"{command} missing --to there" for command in ("export", "calibrate", "upcycle")],
        "missing: no such run folder",
    ),
    **dict.fromkeys(
        ("train --data missing", "compare --data missing", "sweep --data missing"), "missing does not exist"
    ),
    "train --data ~no-such-user/text": "~no-such-user",
    "evaluate ~no-such-user/run": "~no-such-user",
    "generate RUN --prompt a\udcff": "'a\\udcff' is not UTF-8; rename the file, or encode",
    "generate": "arguments are required: RUN … see et generate --help",
    "train --d-model 31": "model.d_model=31 cannot be divided into heads … a multiple of that",
    "compare --rules all,dense": "--rules: all is unknown; choose from dense, token_choice",
    "analyze missing": "missing: no such run folder",
    "analyze . --figures warm": "--figures: warm is unknown; did you mean warmup?",
    "analyze . --gsm8k missing": "--gsm8k missing does not exist",
    "analyze . --domain novels": "--domain novels: expected NAME=SOURCE",
    "analyze . --domain a=code --domain a=embedded": "--domain a=embedded: the name a is already taken",
    "analyze . --human-eval missing": "--human-eval missing does not exist",
    "import missing": "missing has no config.json",
    # et plan and et train.
    "plan tiny --gpus 17": "--gpus 17: a step has only 16 sequences",
    "plan tiny --gpus 2 --micro-batch 3": "--micro-batch 3 on 2 GPUs does not divide a step of 16 sequences",
    "plan tiny --gpus 3 --micro-batch 1": "--gpus 3 does not divide a step of 16 sequences",
    "plan tiny --gpus 4 --batch-size 2 --accumulation 8": "4 ranks cannot share the 2 sequences",
    "plan tiny --gpus 16 --train.expert-parallel 5": "expert_parallel=5 does not divide the 16 ranks",
    "plan tiny --gpus 3 --batch-size 3 --train.expert-parallel 3": "num_experts=16 cannot be split over 3 ranks",
    "plan tiny --peak-tflops 1e-320": "the run would never finish",
    "plan tiny --peak-tflops 1e-9 --price-per-gpu-hour 1e308": "--price-per-gpu-hour 1e+308: the cost overflows",
    "train --recipe expert_treshold": "did you mean expert_threshold?",
    "train tiny --tokens 2047": "tokens=2047 is less than one batch of 2048 tokens",
    "train tiny --tokens 9999 --steps 3": "set the length",
    "train tiny --rule.warmup-steps 101": "rule.warmup_steps=101 is longer than the run of 100 steps",
    "train tiny --optim.adamw-warmup-steps 101": "optim.adamw_warmup_steps=101 is longer than the run of 100 steps",
    "train --recipe expert_threshold --steps 100 --rule.warmup-steps 4000": "warmup_steps=4000 is longer than the run",
    "plan --recipe expert_choice_8k tiny --batch-size 6": "pool=512 does not divide the batch of 6 × 128",
    "train --recipe expert_choice_8k tiny --batch-size 6": "pool=512 does not divide the batch of 6 × 128",
    "train SMALL --minutes 1 --steps 3": "train.steps=3 and minutes=1.0",
    "train SMALL --threads 100000": "threads=100000 … at most",
    "train --out RUN": "--out … already exists … --resume",
    "train --resume RUN --steps 1": "steps=1",
    "train --resume RUN --steps 9 --minutes 1": "steps=9 and minutes=1.0",
    "train d12 --resume RUN": "PRESET d12 … leave it out",
    "train --resume RUN --rule dense": "--rule dense … leave it out",
    "train --resume RUN --no-rule.debias": "--no-rule.debias … leave it out",
    "train --init-from RUN --layers 5 --out x --data TEXT": "layers=5 … --init-from",
    f"generate RUN --prompt {'the-cat-' * 99}": "prompt … shorten it",
    # et compare and et sweep.
    "compare SMALL --rules expert_treshold": "--rules: expert_treshold … did you mean expert_threshold?",
    "compare SMALL --rules dense,": "--rules dense, has an empty name before or after a comma",
    "compare SMALL --seed 3": "unknown option --seed … --seeds",
    "compare SMALL --rule dense": "unknown option --rule … --rules",
    "compare SMALL --rule.balance aux": "--rule.balance aux: cannot be set for dense, token_choice",
    "compare SMALL --rules dense,token_choice --rule.decay 0.5": "--rule.decay 0.5 … dense, token_choice … leave it",
    "compare SMALL --rules dense --baseline relu": "--baseline relu … dense",
    "compare SMALL --eval-every none": "--eval-every none … omit this option",
    "compare SMALL --experts-per-token 0.05": "rule.experts_per_token … 0.05",
    "compare SMALL --rules dense,expert_threshold --rule.pool 7": "pool … 7",
    "compare SMALL --vocab-size 256": "vocab_size=256",
    "sweep SMALL --space optim.matrix_lr": "--space optim.matrix_lr: write NAME=LOW..HIGH",
    "sweep SMALL --space optim.matrix_lr=0.1": "nothing to search … two or more",
    "sweep SMALL --space optim.matrix_lr=0.1|0.2|1e-1": "nothing to search … two or more distinct values",
    "sweep SMALL --space train.batch_size=1|2": "batch_size cannot be searched … run a sweep for each --batch-size",
    "sweep SMALL --space train.steps=1..9": "train.steps cannot be searched, since all trials share the text",
    "sweep SMALL --space optim.matrix_lr=0.1..0.1": "nothing to search … 0.1 is not below 0.1",
    "sweep SMALL --space optim.weight_decay=0..0.1:log": "must start above 0",
    "sweep SMALL --space optim.matrix_lr=-1..0.1": "optim.matrix_lr=-1..0.1: expected a number above 0 … not -1",
    "sweep SMALL --space optim.matrix_lr=0.01..0.1:lin": "unknown scale 'lin'",
    "sweep SMALL --space optim.matrx_lr=0.1..1": "unknown option optim.matrx_lr … did you mean optim.matrix_lr",
    "sweep SMALL --space rule=dense|top_p": "rule.name cannot be searched … --methods",
    "sweep SMALL --space optim.head_lr=1..2 --space optim.head-lr=1..3": "head_lr is given twice",
    "sweep SMALL --space optim.head_lr=0.1..1 --optim.head-lr 0.1": "--optim.head-lr 0.1 … leave one of them out",
    "sweep SMALL --space rule.balance=aux|none": "balance=aux|none … cannot be set for expert_threshold",
    "sweep SMALL --space optim.router_lr=0.1..1 --methods dense,relu": "no option of method dense … leave dense out",
    "sweep SMALL --space rule.warmup_steps=0..900": "--space rule.warmup_steps=0..900 … longer than the run",
    "sweep SMALL --methods expert_treshold": "--methods: expert_treshold … did you mean expert_threshold?",
    # et evaluate, et calibrate, et upcycle and et serve.
    "evaluate RUN --bundle nowhere": "nowhere is not an eval bundle: core.yaml is missing",
    "evaluate RUN --bundle BUNDLE --tasks animal": "did you mean animals?",
    "evaluate RUN --bundle BUNDLE --max-per-task 1": "copy shows 1 solved examples",
    "evaluate RUN --tasks copy": "--tasks copy has no effect without --bundle",
    "evaluate RUN --no-validation": "--no-validation",
    "evaluate RUN --no-validation --bundle BUNDLE --eval-tokens 5": "has no effect without --validation",
    "evaluate RUN --text-field body": "--text-field body has no effect without --data",
    "evaluate RUN --harness-path BUNDLE": "has no effect without --harness",
    "evaluate RUN --data BUNDLE/nothing.txt": "nothing.txt does not exist",
    "evaluate RUN --data BUNDLE/eval_data/copy.jsonl": "line 1 has no text in text_field='text'",
    "evaluate RUN --step 7": "no checkpoint of step 7",
    "evaluate MADE/token_choice --rates 1": "--rates 1: … token_choice was trained with token_choice, which",
    "evaluate MADE/dense --rates 1": "--rates 1: … dense was trained with dense, which has no cutoffs",
    "evaluate MADE/dense --rate 1": "--rate 1: … dense was trained with dense, which has no cutoffs",
    "evaluate MADE/expert_choice --rates 1,-1": "--rates 1,-1: expected a number of at least 0, not -1",
    "evaluate MADE/expert_choice --rates 1,5": "rate=5.0 must be between 0 and num_experts=4",
    "evaluate MADE/expert_choice --rates=1 --rate=1": "--rates 1 measures only the validation loss; leave --rate out",
    "evaluate MADE/expert_choice --rates=1 --bundle=x": "--rates 1 measures only the validation loss; leave --bundle",
    "calibrate MADE/token_choice --to new": "token_choice was trained with token_choice, which has no cutoffs",
    "calibrate MADE/dense --to new": "dense was trained with dense, which has no cutoffs",
    "calibrate MADE/expert_choice --experts-per-token 5 --to new": "experts_per_token=5.0",
    "calibrate MADE/expert_choice --to MADE": "already exists; name another folder",
    "calibrate MADE/expert_choice --batch-size 1 --experts-per-token 0.01 --to new": "pool of 64 tokens: k = ",
    "upcycle MADE/expert_threshold --to new": "expert_threshold already has experts",
    "upcycle MADE/dense --num-experts 0 --to new": "rule.num_experts",
    "serve MADE/dense --threads 1000000": "threads=1000000",
    "serve MADE/dense --host 192.0.2.1": "--host 192.0.2.1 is not an address of this machine",
    "serve MADE/dense --host nowhere.invalid": "--host nowhere.invalid is unknown",
    f"serve MADE/dense --host {'a' * 70}": "a is unknown",
    "serve MADE/dense --public-host https://a.b/": "--public-host https://a.b/ must be a plain host name",
    "serve MADE/dense --cors example.org": "--cors example.org must be an origin, such as https://example.org",
    "serve MADE/dense --api-key 'key '": "--api-key or ET_API_KEY must be printable ASCII without spaces",
    "serve MADE/dense --host 0.0.0.0 --compare other": "add --explorer",
}
"""A command line for each refusal, and parts of the line that it prints, separated by …."""
PLACES = {"SMALL": "small", "RUN": "copy", "TEXT": "text", "MADE": "made", "BUNDLE": "bundle"}
"""The fixture that each of these words stands for."""
NEEDS = {"serve": "uvicorn", "sweep": "optuna"}


@pytest.mark.parametrize("typed", REFUSED)
def test_what_cannot_be_done_is_refused_in_one_line_and_harms_nothing(
    typed: str, refused: Refused, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    if package := NEEDS.get(typed.partition(" ")[0]):
        pytest.importorskip(package, reason=f"{package} is not installed")
    monkeypatch.chdir(tmp_path)
    line = typed
    for place, fixture in PLACES.items():
        if place in typed:
            found = request.getfixturevalue(fixture)
            line = line.replace(place, " ".join(map(str, found)) if isinstance(found, list) else str(found))
    refused(shlex.split(line), *REFUSED[typed].split(" … "))
