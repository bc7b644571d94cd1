"""The teacher as a `vllm.LLM` in this process, through its prompt log-probabilities."""

from collections.abc import Iterator, Sequence
from typing import Any

from ..teacher_cache.topk import TeacherTopK
from .candidates import signal_from_candidates
from .engine import GenerationOptions, ScoreRequest, TeacherDescription, TokenRow
from .transformers_engine import TransformersTeacher


# Rows handed to vLLM at a time: enough to fill its scheduler, few enough to hold their answers.
_ROWS_PER_CALL = 64


class VLLMTeacher:
    """Scores rows with `vllm.LLM`.

    vLLM only tells the K most likely tokens, so tail log-sums at other temperatures and the sampled layout are not
    available, and the tail is what the K leave of 1 (to about 1e-7).

    Args:
        model (`str`):
            Model id or path.
        max_logprobs (`int`, *optional*, defaults to `1024`):
            Largest K vLLM is set up for.
        llm_kwargs:
            Passed to `vllm.LLM` (`tensor_parallel_size`, `dtype`, `max_model_len`, `quantization`, ...).
    """

    full_distribution = False

    def __init__(self, model: str, *, max_logprobs: int = 1024, **llm_kwargs: Any) -> None:
        self.model_id = model
        self.max_top_k = max_logprobs
        self.llm_kwargs = llm_kwargs
        self.llm = None
        names = ("revision", "trust_remote_code", "dtype")
        options = {name: llm_kwargs[name] for name in names if name in llm_kwargs}
        # Reads the same configuration and weight files; nothing is loaded.
        self._files = TransformersTeacher(model, model_init_kwargs=options)
        length = llm_kwargs.get("max_model_len") or self._files.max_length
        # One token must be generated.
        self.max_length = None if length is None else int(length) - 1
        self.head_rows = self._files.head_rows

    def describe(self) -> TeacherDescription:
        files = self._files.describe()
        return TeacherDescription(
            teacher=files.teacher,
            revision=files.revision,
            fingerprint=files.fingerprint,
            engine="vllm",
            dtype=files.dtype,
            options={
                name: str(self.llm_kwargs[name])
                for name in ("quantization", "kv_cache_dtype")
                if name in self.llm_kwargs
            },
        )

    def load(self) -> None:
        try:
            import vllm
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                "`engine='vllm'` needs vLLM in this environment (`pip install vllm`); or serve the teacher and pass "
                "its URL."
            ) from error
        self._vllm = vllm
        self.llm = vllm.LLM(model=self.model_id, max_logprobs=self.max_top_k, **self.llm_kwargs)

    def close(self) -> None:
        self.llm = None

    def score(self, rows: Sequence[TokenRow], request: ScoreRequest) -> Iterator[tuple[int, TeacherTopK]]:
        sampling = self._vllm.SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=request.top_k)
        for start in range(0, len(rows), _ROWS_PER_CALL):
            group = rows[start : start + _ROWS_PER_CALL]
            prompts = [{"prompt_token_ids": list(row.input_ids)} for row in group]
            outputs = self.llm.generate(prompts, sampling, use_tqdm=False)
            for index, (row, output) in enumerate(zip(group, outputs, strict=True)):
                yield start + index, signal_from_candidates(output.prompt_logprobs, row, request)

    def generate(
        self, prompts: Sequence[Sequence[int]], source_rows: Sequence[int], options: GenerationOptions
    ) -> list[list[int]]:
        sampling = [
            self._vllm.SamplingParams(
                max_tokens=options.max_new_tokens,
                temperature=options.temperature,
                top_p=options.top_p,
                top_k=options.top_k,
                seed=options.seed * 1_000_003 + row,
            )
            for row in source_rows
        ]
        outputs = self.llm.generate(
            [{"prompt_token_ids": list(prompt)} for prompt in prompts], sampling, use_tqdm=False
        )
        return [list(output.outputs[0].token_ids) for output in outputs]
