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
from pathlib import Path
from typing import Any

NEW_TOKENS = 12


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


if __name__ == "__main__":
    if sys.argv[1] == "killed":
        run_and_die(int(sys.argv[2]), sys.argv[3:])
    else:
        answer_alone(sys.argv[2], Path(sys.argv[3]), Path(sys.argv[4]))
