"""What runs in lmms-eval's own environment: its command line, killed after some batches, and the model by itself.

python -m tests.integrations.lmms_eval_program killed BATCHES [flags of lmms-eval]
python -m tests.integrations.lmms_eval_program alone MODEL QUESTIONS ANSWERS
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

NEW_TOKENS = 12
CUT_AT = "w35"


def run_and_die(batches: int, flags: list[str]) -> None:
    from brim.evaluation.journals import Journals

    append, left = Journals.append, [batches]

    def append_and_count(self: Journals, lines: Any) -> None:
        append(self, lines)
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    Journals.append = append_and_count  # type: ignore[method-assign]
    sys.argv = ["lmms_eval", *flags]
    runpy.run_module("lmms_eval", run_name="__main__", alter_sys=True)


def answer_alone(model: str, questions: Path, answers: Path) -> None:
    """Each question by itself, by transformers alone."""
    import torch
    import transformers
    from PIL import Image

    processor = transformers.AutoProcessor.from_pretrained(model)
    module = transformers.AutoModelForImageTextToText.from_pretrained(model, dtype=torch.float32).eval()
    found = []
    for line in questions.read_text(encoding="utf-8").splitlines():
        question = json.loads(line)
        content = [*({"type": "image"} for _ in question["images"]), {"type": "text", "text": question["question"]}]
        text = processor.apply_chat_template(
            [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
        )
        images = [Image.open(path) for path in question["images"]]
        inputs = processor(
            text=text, return_tensors="pt", add_special_tokens=False, **({"images": images} if images else {})
        )
        made = module.generate(**inputs, max_new_tokens=NEW_TOKENS, do_sample=False)
        found.append(processor.batch_decode(made[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)[0])
    answers.write_text(json.dumps(found), encoding="utf-8")


def use_as_object(model: str, tasks: str, found: Path) -> None:
    """An evaluation in Python, and what is refused."""
    from lmms_eval.api.instance import Instance
    from lmms_eval.evaluator import simple_evaluate
    from lmms_eval.tasks import TaskManager

    from brim.errors import RequestError
    from brim.integrations.lmms_eval import BrimLMMS

    def refusal(call: Callable[..., Any], *arguments: Any, **settings: Any) -> str:
        try:
            call(*arguments, **settings)
        except RequestError as error:
            return str(error)
        return "not refused"

    def request(content: dict[str, Any]) -> Instance:
        def messages(doc: Any) -> list[dict[str, Any]]:
            return [{"role": "user", "content": [content]}]

        arguments = ("", messages, {"max_new_tokens": 4}, 0, "pictured", "test")
        return Instance("generate_until", arguments, 0, {"task": "pictured", "doc_id": 0, "repeats": 1})

    lm = BrimLMMS(model, device="cpu", dtype="float32", no_cache=True, use_until=True, batch_size=4)
    lm.task_dict["pictured"] = {"test": [{}]}
    said = {
        "loglikelihood": refusal(lm.loglikelihood, []),
        "rounds": refusal(lm.generate_until_multi_round, []),
        "video": refusal(lm.generate_until, [request({"type": "video", "url": "a.mp4"})]),
        "address": refusal(lm.generate_until, [request({"type": "image", "url": "gone.png"})]),
        "resume": refusal(BrimLMMS, model, resume=True),
    }
    results = simple_evaluate(
        model=lm, tasks=["pictured"], task_manager=TaskManager(include_path=tasks, model_name="brim"), limit=9,
        gen_kwargs=f"until={CUT_AT}", bootstrap_iters=0,
    )  # fmt: skip
    cut = [sample["filtered_resps"][0] for sample in results["samples"]["pictured"]]
    again = refusal(lm.generate_until, [request({"type": "text", "text": "3"})])
    found.write_text(json.dumps({**said, "cut": cut, "again": again}), encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[1] == "killed":
        run_and_die(int(sys.argv[2]), sys.argv[3:])
    elif sys.argv[1] == "object":
        use_as_object(sys.argv[2], sys.argv[3], Path(sys.argv[4]))
    else:
        answer_alone(sys.argv[2], Path(sys.argv[3]), Path(sys.argv[4]))
