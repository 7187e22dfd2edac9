"""Trains the model that brim ships (src/brim/demo/weights) on DigitBoard, from nothing, on one CPU thread.

    python examples/digitboard/train.py --steps 12000

Each step draws boards of one shape and a random `max_crops`, so that every value of it works afterwards. A board is
encoded once and asked ten questions: they stand one after another behind the picture, each at the positions and
behind the mask that it would have alone. Beside the answers the picture's tokens are trained to tell which digit stands
where they are (a head that is thrown away), first on boards full of small digits and without questions; without that,
reading takes far longer to begin.

Every number follows from the seed and the step, so a run that was broken off goes on as if it had not been.
"""

from __future__ import annotations

import argparse
import itertools
import math
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from torch.nn import functional

from brim.demo.digitboard import (
    LAYOUTS,
    Board,
    Digit,
    Question,
    Split,
    board_pixels,
    draw_board,
    draw_questions,
    scan_numbers,
    scan_value,
)
from brim.demo.model import IMAGE_TOKEN, build_config, build_processor, weights_folder

TRAINED_CROPS = {1: 1, 2: 2, 3: 1, 4: 2, 6: 2, 8: 1, 9: 2, 10: 2, 12: 4}  # max_crops and how often it is drawn
EVALUATED_CROPS = (1, 2, 4, 6, 9, 12)
QUESTIONS = 10  # about each board
NO_DIGIT = 10  # the class of a token without a digit
IGNORED = -100
TOKEN_SIDE = 16  # pixels of a crop that become one token, each way
TRAIN_SCANS = scan_numbers("train")


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Boards of one shape as the model's inputs, and what is to be learnt from them."""

    inputs: dict[str, torch.Tensor]
    answers: torch.Tensor  # [boards, tokens]: the token that should follow, or IGNORED
    token_digits: torch.Tensor  # [boards × picture tokens]: a digit, NO_DIGIT or IGNORED


def main() -> None:
    arguments = read_arguments()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(arguments.seed)
    processor = build_processor()
    model = transformers.Molmo2ForConditionalGeneration(build_config())
    trainer = Trainer(model, processor, arguments)
    trainer.resume()
    trainer.train()
    averaged = trainer.averaged_model()
    print(accuracy_table(averaged, processor, questions=arguments.evaluate, seed=1))
    save(averaged, processor, arguments.out)


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=12_000)
    parser.add_argument("--seeing-steps", type=int, default=900, help="without questions, at the start")
    parser.add_argument("--boards", type=int, default=16, help="in a step")
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--evaluate", type=int, default=1000, help="questions of the figures at the end")
    parser.add_argument("--checkpoints", type=Path, default=Path("runs/digitboard"), help="to go on from")
    parser.add_argument("--out", type=Path, default=weights_folder())
    return parser.parse_args()


class Trainer:
    """The model, its optimiser, and a running mean of its weights, which is what is kept in the end."""

    def __init__(self, model: Any, processor: Any, arguments: argparse.Namespace) -> None:
        self.model, self.processor, self.arguments = model, processor, arguments
        self.digit_head = nn.Linear(model.config.text_config.hidden_size, NO_DIGIT + 1)
        self.weights = [*model.parameters(), *self.digit_head.parameters()]
        self.optimizer = torch.optim.AdamW(self.weights, lr=arguments.learning_rate, betas=(0.9, 0.98))
        self.mean = {name: value.clone() for name, value in model.state_dict().items()}
        self.step = 0

    def train(self) -> None:
        started, first = time.monotonic(), self.step
        asking: list[tuple[float, float, float]] = []
        seeing: list[tuple[float, float, float]] = []
        while self.step < self.arguments.steps:
            (seeing if self.only_sees() else asking).append(self.one_step())
            if self.step % 50 == 0:
                rate = (time.monotonic() - started) / (self.step - first)
                print(
                    f"step {self.step}:{means('asking', asking)}{means('seeing', seeing)} {rate:.2f} s a step",
                    flush=True,
                )
                asking.clear()
                seeing.clear()
            if self.step % 500 == 0:
                self.keep()
            if self.step % 1000 == 0:
                print(accuracy_table(self.averaged_model(), self.processor, questions=200, seed=2), flush=True)

    def only_sees(self) -> bool:
        """Whether this step asks no questions: all at the start, later one in four."""
        return self.step < self.arguments.seeing_steps or self.step % 4 == 0

    def one_step(self) -> tuple[float, float, float]:
        """Learn from one batch; the losses of answers and picture tokens, and the share of answers that were right."""
        generator = random.Random(f"{self.arguments.seed} {self.step}")
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate()
        if self.only_sees():
            return self.see(generator)
        batch = make_batch(self.processor, generator, boards=self.arguments.boards)
        outputs = self.model.model(**batch.inputs, use_cache=False)
        asked = batch.answers != IGNORED
        logits, answers = self.model.lm_head(outputs.last_hidden_state[asked]), batch.answers[asked]
        answer_loss = functional.cross_entropy(logits, answers)
        digit_loss = self.digit_loss(outputs.image_hidden_states, batch.token_digits)
        self.descend(answer_loss + digit_loss)
        first = answers != self.processor.tokenizer.eos_token_id
        right = (logits.argmax(-1) == answers)[first].float().mean()
        return answer_loss.item(), digit_loss.item(), right.item()

    def see(self, generator: random.Random) -> tuple[float, float, float]:
        """Learn to see digits only, on boards full of them: the half that reads has nothing to read yet."""
        drawn = [dense_board(generator) for _ in range(self.arguments.boards // 2)]
        seen = as_seen(self.processor, drawn, generator.choice((4, 6, 9, 12)))
        picture = {name: seen[name] for name in ("pixel_values", "image_token_pooling", "image_grids")}
        features = torch.cat(self.model.get_image_features(**picture).pooler_output)
        digits = digits_of_tokens(drawn, seen)
        loss = self.digit_loss(features, digits)
        self.descend(loss)
        here = (digits != NO_DIGIT) & (digits != IGNORED)
        right = (self.digit_head(features).argmax(-1) == digits)[here].float().mean()
        return 0.0, loss.item(), right.item()

    def descend(self, loss: torch.Tensor) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(self.weights, 1.0)
        self.optimizer.step()
        self.step += 1
        self.update_mean()

    def digit_loss(self, features: torch.Tensor, digits: torch.Tensor) -> torch.Tensor:
        """Few tokens hold a digit: those without one count a tenth."""
        weight = torch.ones(NO_DIGIT + 1)
        weight[NO_DIGIT] = 0.1
        return functional.cross_entropy(self.digit_head(features), digits, weight=weight)

    def learning_rate(self) -> float:
        """Up over 200 steps, then down to a hundredth along a cosine."""
        warm, whole = 200, self.arguments.steps
        share = min(1.0, max(0.0, (self.step - warm) / max(1, whole - warm)))
        fall = 0.01 + 0.99 * (1 + math.cos(math.pi * share)) / 2
        return float(self.arguments.learning_rate * min(1.0, (self.step + 1) / warm) * fall)

    def update_mean(self) -> None:
        kept = min(0.998, self.step / (self.step + 10))
        with torch.no_grad():
            for name, value in self.model.state_dict().items():
                self.mean[name].lerp_(value, 1 - kept)

    def averaged_model(self) -> Any:
        model = transformers.Molmo2ForConditionalGeneration(build_config())
        model.load_state_dict(self.mean)
        return model.eval()

    def keep(self) -> None:
        self.arguments.checkpoints.mkdir(parents=True, exist_ok=True)
        file = self.arguments.checkpoints / "last.pt"
        parts = {name: getattr(self, name).state_dict() for name in ("model", "digit_head", "optimizer")}
        torch.save({**parts, "mean": self.mean, "step": self.step}, file.with_suffix(".new"))
        file.with_suffix(".new").replace(file)

    def resume(self) -> None:
        file = self.arguments.checkpoints / "last.pt"
        if not file.is_file():
            return
        kept = torch.load(file, weights_only=True)
        for name in ("model", "digit_head", "optimizer"):
            getattr(self, name).load_state_dict(kept[name])
        self.mean, self.step = kept["mean"], kept["step"]
        print(f"goes on at step {self.step}")


def means(kind: str, losses: list[tuple[float, float, float]]) -> str:
    if not losses:
        return ""
    answer, digit, right = torch.tensor(losses).mean(0).tolist()
    return f" {kind}: loss {answer:.3f} + {digit:.3f}, right {right:.3f};"


def make_batch(processor: Any, generator: random.Random, *, boards: int) -> Batch:
    """Training boards of one shape, cut into at most `max_crops` crops, with questions behind each."""
    layout = generator.choice(LAYOUTS)
    max_crops = generator.choices(list(TRAINED_CROPS), weights=list(TRAINED_CROPS.values()))[0]
    drawn = [draw_board(generator, split="train", layout=layout) for _ in range(boards)]
    questions = [draw_questions(generator, board, count=QUESTIONS) for board in drawn]
    seen = as_seen(processor, drawn, max_crops)
    inputs, answers = packed(processor, seen, questions)
    return Batch(inputs=inputs, answers=answers, token_digits=digits_of_tokens(drawn, seen))


def dense_board(generator: random.Random) -> Board:
    """A board of small cells, each with a small digit; no question is asked about it."""
    cell, layout = 24, LAYOUTS[0]
    cells = itertools.product(range(layout.height // cell), range(layout.width // cell))
    digits = [dense_digit(generator, row * cell, column * cell, cell) for row, column in cells]
    return Board(layout=layout, digits=tuple(digits))


def dense_digit(generator: random.Random, top: int, left: int, cell: int) -> Digit:
    scan, side = generator.choice(TRAIN_SCANS), generator.randint(9, 22)
    top, left = top + generator.randint(0, cell - side), left + generator.randint(0, cell - side)
    return Digit(value=scan_value(scan), scan=scan, row=0, column=0, top=top, left=left, side=side)


def as_seen(processor: Any, drawn: Sequence[Board], max_crops: int) -> dict[str, torch.Tensor]:
    """Boards of one shape as the processor gives them, without a question."""
    pictures = [[torch.from_numpy(board_pixels(board)).permute(2, 0, 1)] for board in drawn]
    texts = [IMAGE_TOKEN] * len(drawn)
    return dict(processor(text=texts, images=pictures, max_crops=max_crops, return_tensors="pt"))


def packed(
    processor: Any, seen: dict[str, torch.Tensor], questions: list[list[Question]]
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """All questions of a board in one row behind its picture, none of which sees another."""
    tokenizer = processor.tokenizer
    texts = [question.text for asked in questions for question in asked]
    replies = tokenizer.convert_tokens_to_ids([question.answer for asked in questions for question in asked])
    ids: list[list[int]] = tokenizer(texts)["input_ids"]
    length = 1 + max(map(len, ids))
    block, answers = torch.zeros(2, len(ids), length, dtype=torch.long)  # [questions, length]
    block.fill_(tokenizer.pad_token_id)
    answers.fill_(IGNORED)
    for row, (question, reply) in enumerate(zip(ids, replies, strict=True)):
        block[row, : len(question) + 1] = torch.tensor([*question, reply])
        answers[row, len(question) - 1] = reply
        answers[row, len(question)] = tokenizer.eos_token_id
    boards, prefix = seen["input_ids"].shape
    count = len(ids) // boards
    block, answers = block.view(boards, -1), answers.view(boards, -1)
    ignored = torch.full((boards, prefix), IGNORED)
    positions = torch.cat([torch.arange(prefix), (prefix + torch.arange(length)).repeat(count)])
    inputs = {
        **seen,
        "input_ids": torch.cat([seen["input_ids"], block], dim=1),
        "mm_token_type_ids": functional.pad(seen["mm_token_type_ids"], (0, count * length)),
        "position_ids": positions[None].expand(boards, -1),
        "attention_mask": packed_mask(seen["mm_token_type_ids"][0], count, length).expand(boards, -1, -1, -1),
    }
    return inputs, torch.cat([ignored, answers], dim=1)


def packed_mask(picture: torch.Tensor, count: int, length: int) -> torch.Tensor:
    """[1, 1, tokens, tokens], true where one token sees another; tokens of the picture all see each other."""
    prefix = len(picture)
    owner = torch.cat([torch.zeros(prefix), 1 + torch.arange(count).repeat_interleave(length)])
    place = torch.arange(len(owner))
    before = place[:, None] >= place[None, :]
    seen = before & ((owner[:, None] == owner[None, :]) | (owner[None, :] == 0))
    whole = functional.pad(picture, (0, count * length)).bool()
    return (seen | (whole[:, None] & whole[None, :]))[None, None]


def digits_of_tokens(drawn: Sequence[Board], seen: dict[str, torch.Tensor]) -> torch.Tensor:
    """[boards × picture tokens]: the digit whose middle lies in the token's square, low resolution first."""
    grid = seen["image_grids"][0].tolist()
    return torch.tensor([digit for board in drawn for view in (grid[:2], grid[2:]) for digit in in_view(board, *view)])


def in_view(board: Board, rows: int, columns: int) -> list[int]:
    """The digits of one view's tokens; one that has less than 5 pixels there is too small to learn from."""
    classes = [NO_DIGIT] * (rows * columns)
    for digit in board.digits:
        tall, wide = rows / board.layout.height, columns / board.layout.width  # tokens a pixel
        row, column = int((digit.top + digit.side / 2) * tall), int((digit.left + digit.side / 2) * wide)
        readable = digit.side * min(tall, wide) * TOKEN_SIDE >= 5
        classes[row * columns + column] = digit.value if readable else IGNORED
    return classes


@torch.inference_mode()
def accuracy_table(model: Any, processor: Any, *, questions: int, seed: int, split: Split = "heldout") -> str:
    """Share of right answers for each max_crops, over all questions and for each kind, with seconds a question."""
    asked: list[tuple[Board, Question]] = []
    generator = random.Random(f"evaluation {seed}")
    while len(asked) < questions:
        board = draw_board(generator, split=split)
        asked += [(board, question) for question in draw_questions(generator, board, count=4)]
    lines = []
    for max_crops in EVALUATED_CROPS:
        started = time.monotonic()
        right = [answer == question.answer for answer, (_, question) in
                 zip(answered(model, processor, asked, max_crops), asked, strict=True)]  # fmt: skip
        seconds = (time.monotonic() - started) / len(asked)
        kinds = sorted({question.question_type for _, question in asked})
        shares = [
            f"{kind} {sum(of_kind) / len(of_kind):.2f}"
            for kind in kinds
            if (of_kind := [hit for hit, (_, question) in zip(right, asked, strict=True)
                            if question.question_type == kind])
        ]  # fmt: skip
        lines.append(f"max_crops {max_crops:2d}: {sum(right) / len(right):.3f}  {1000 * seconds:.1f} ms  "
                     + ", ".join(shares))  # fmt: skip
    return "\n".join(lines)


def answered(model: Any, processor: Any, asked: list[tuple[Board, Question]], max_crops: int) -> list[str]:
    """The model's answers, as anyone would ask for them: by the processor and `generate`."""
    answers: list[str] = []
    for start in range(0, len(asked), 32):
        part = asked[start : start + 32]
        pictures = [[torch.from_numpy(board_pixels(board)).permute(2, 0, 1)] for board, _ in part]
        texts = [f"{IMAGE_TOKEN}\n{question.text}" for _, question in part]
        inputs = processor(text=texts, images=pictures, max_crops=max_crops, return_tensors="pt", padding=True)
        written = model.generate(**inputs, max_new_tokens=3, do_sample=False)
        tokens = written[:, inputs["input_ids"].shape[1] :]
        answers += [text.strip() for text in processor.batch_decode(tokens, skip_special_tokens=True)]
    return answers


def save(model: Any, processor: Any, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    size = sum(file.stat().st_size for file in folder.iterdir())
    print(f"wrote {folder}: {sum(value.numel() for value in model.parameters()):,} parameters, {size:,} bytes")


if __name__ == "__main__":
    main()
