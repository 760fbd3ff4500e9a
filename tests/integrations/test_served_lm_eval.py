"""lm-evaluation-harness's own client of OpenAI's completions, against the server, says what our model class says."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("lm_eval", reason="lm-evaluation-harness is not installed: pip install 'lm-eval[api]'")
for name in ("aiohttp", "requests", "tenacity", "tqdm"):
    pytest.importorskip(name, reason=f"{name}, which the harness's clients need, is not: pip install 'lm-eval[api]'")
pytest.importorskip("transformers", reason="transformers is not installed: pip install -e '.[hf]'")
pytest.importorskip("uvicorn", reason="the server's packages are not installed: pip install -e '.[serve]'")
pytestmark = pytest.mark.filterwarnings("ignore")  # those of the harness's many packages are not ours

from lm_eval.api.instance import Instance  # noqa: E402
from lm_eval.models.openai_completions import LocalCompletionsAPI  # noqa: E402

from cases import write_run  # noqa: E402
from expert_threshold.data import Tokenizer  # noqa: E402
from expert_threshold.generate import generate  # noqa: E402
from expert_threshold.integrations.export import export_run  # noqa: E402
from expert_threshold.integrations.lm_eval import HarnessModel  # noqa: E402
from expert_threshold.model import GPT  # noqa: E402
from served import served  # noqa: E402

CONTEXT = 64  # of the small model
PAIRS = [
    (context, ending)
    for context in ("the cat", "on the mat; the hat", "a")
    for ending in (" sat", " on the mat", " cät", "; the hat of")
]


@pytest.fixture(scope="module")
def client(model: GPT, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Follows docs/serving.md."""
    folder = tmp_path_factory.mktemp("run")
    export_run(write_run(folder / "run", model).path, folder / "exported")
    with served(model) as server:
        yield LocalCompletionsAPI(
            model="small",
            base_url=f"{server.url}/v1/completions",
            tokenizer=str(folder / "exported"),
            tokenizer_backend="huggingface",
            max_length=CONTEXT,
            batch_size=4,
            max_retries=1,
            add_bos_token=True,
        )


def requests(kind: Any, arguments: list[tuple[Any, ...]]) -> list[Instance]:
    return [Instance(kind, {}, each, i) for i, each in enumerate(arguments)]


def test_log_likelihoods_are_those_of_our_model_class(client: Any, model: GPT, tokenizer: Tokenizer) -> None:
    likeliest = [
        (context, step.text)
        for context in ("the cat", "sat on", "of the", "hat; the", "mat", "the hat of")
        for step in generate(model, tokenizer, context, max_tokens=1, temperature=0)
        if tokenizer.encode(context + step.text) == [*tokenizer.encode(context), step.token]
    ]
    assert likeliest
    pairs = [*PAIRS, *likeliest, ("", "the cat"), ("", " sat on")]
    expected = HarnessModel(model, tokenizer).loglikelihood(requests("loglikelihood", pairs))
    found = client.loglikelihood(requests("loglikelihood", pairs), disable_tqdm=True)
    assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]
    assert {greedy for _, greedy in found} == {False, True}
    assert [nats for nats, _ in found] == pytest.approx([nats for nats, _ in expected], abs=1e-3)


def test_whole_texts_have_the_scores_of_our_model_class_as_the_client_opens_them_itself(
    client: Any, model: GPT, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: by the documented route the token that opens a text was scored, or sent as characters."""
    longest = tokenizer.decode(tokenizer.encode("the cat sat on the mat; " * 9)[: CONTEXT - 2])
    texts = requests("loglikelihood_rolling", [("the hat of the cat",), ("",), (longest,)])
    expected = HarnessModel(model, tokenizer).loglikelihood_rolling(texts)
    monkeypatch.setattr(client, "add_bos_token", False)
    assert client.loglikelihood_rolling(texts, disable_tqdm=True) == pytest.approx(expected, abs=1e-3)


def test_texts_are_those_of_our_model_class(client: Any, model: GPT, tokenizer: Tokenizer) -> None:
    asked = requests(
        "generate_until",
        [(context, {"until": ["t"], "max_gen_toks": 9, "temperature": 0}) for context, _ in PAIRS[::4]],
    )
    assert client.generate_until(asked, disable_tqdm=True) == HarnessModel(model, tokenizer).generate_until(asked)
