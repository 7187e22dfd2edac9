"""Trains the model that brim ships (src/brim/demo/weights) on DigitBoard, from nothing, on one CPU thread.

    python examples/digitboard/train.py --steps 4000

Each step draws boards of one shape and a random `max_crops`, so that every value of it works afterwards. A board is
encoded once and asked ten questions: they stand one after another behind the picture, each at the positions and behind
the mask that it would have alone. Beside the answers, the picture's tokens are trained to predict which digit is where
they are, and in which cell (a head that is thrown away): at the start on boards full of small digits and without
questions. And half of the middle layer's heads are shown which tokens the question is about. Without these two,
answers stay guesses for thousands of steps.

Every number follows from the seed and the step, so an interrupted run continues as if it had not been interrupted.
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
    ALL_KINDS,
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

TRAINED_CROPS = {1: 1, 2: 1, 3: 1, 4: 2, 6: 2, 8: 1, 9: 2, 10: 1, 12: 4}  # max_crops and how often it is drawn
TRAINED_SIDES = (9, 24)  # pixels; crops shrink them, so smaller ones are seen as well
EASY_CROPS = {1: 1, 2: 1}
EASY_SIDES = (22, 30)  # pixels, readable with the fewest crops
EVALUATED_CROPS = (1, 2, 3, 4, 6, 8, 9, 10, 12)
QUESTIONS = 10  # about each board
NO_DIGIT = 10  # the class of a token without a digit
IGNORED = -100
TOKEN_SIDE = 16  # pixels of a crop that become one token, each way
TOKEN_CLASSES = (NO_DIGIT + 1, 4, 5, 2)  # digits, rows, columns, whether it is the largest
TRAIN_SCANS = scan_numbers("train")


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Boards of one shape as the model's inputs, and what is to be learnt from them."""

    inputs: dict[str, torch.Tensor]
    answers: torch.Tensor  # [boards, tokens]: the token that should follow, or IGNORED
    looked_at: torch.Tensor  # [boards, questions, picture tokens]: true where the answer is to be found
    token_facts: torch.Tensor  # [boards × picture tokens, 4]: digit or NO_DIGIT, row, column, whether the largest


def main() -> None:
    arguments = read_arguments()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(arguments.seed)
    processor = build_processor()
    model = fresh_model()
    trainer = Trainer(model, processor, arguments)
    trainer.resume()
    trainer.train()
    averaged = trainer.averaged_model()
    print(accuracy_table(averaged, processor, questions=arguments.evaluate, seed=1))
    save(averaged, processor, arguments.out)


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--seeing-steps", type=int, default=900, help="without questions, at the start")
    parser.add_argument("--easy-steps", type=int, default=400, help="after them, with large digits and few crops")
    parser.add_argument("--boards", type=int, default=16, help="in a step")
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--evaluate", type=int, default=1000, help="questions of the figures at the end")
    parser.add_argument("--checkpoints", type=Path, default=Path("runs/digitboard"), help="to continue from")
    parser.add_argument("--out", type=Path, default=weights_folder())
    return parser.parse_args()


class Trainer:
    """The model, its optimiser, and a running mean of its weights, which is what is kept in the end."""

    def __init__(self, model: Any, processor: Any, arguments: argparse.Namespace) -> None:
        self.model, self.processor, self.arguments = model, processor, arguments
        self.digit_head = nn.Linear(model.config.text_config.hidden_size, sum(TOKEN_CLASSES))
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
                averaged = self.averaged_model()
                print(accuracy_table(averaged, self.processor, questions=200, seed=2), flush=True)
                save(averaged, self.processor, self.arguments.out)

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
        easy = self.step < self.arguments.seeing_steps + self.arguments.easy_steps
        batch = make_batch(self.processor, generator, boards=self.arguments.boards, easy=easy)
        outputs = self.model.model(**batch.inputs, use_cache=False, output_attentions=True)
        asked = batch.answers != IGNORED
        logits, answers = self.model.lm_head(outputs.last_hidden_state[asked]), batch.answers[asked]
        answer_loss = functional.cross_entropy(logits, answers)
        token_loss = self.token_loss(outputs.image_hidden_states, batch.token_facts)
        self.descend(answer_loss + token_loss + 0.2 * self.look_loss(outputs.attentions, batch))
        first = answers != self.processor.tokenizer.eos_token_id
        right = (logits.argmax(-1) == answers)[first].float().mean()
        return answer_loss.item(), token_loss.item(), right.item()

    def see(self, generator: random.Random) -> tuple[float, float, float]:
        """Learn to see digits only, on boards full of them: the half that reads has nothing to read yet."""
        drawn = [dense_board(generator) for _ in range(self.arguments.boards // 2)]
        seen = as_seen(self.processor, drawn, generator.choice((4, 6, 9, 12)))
        picture = {name: seen[name] for name in ("pixel_values", "image_token_pooling", "image_grids")}
        features = torch.cat(self.model.get_image_features(**picture).pooler_output)
        facts = facts_of_tokens(drawn, seen)
        loss = self.token_loss(features, facts)
        self.descend(loss)
        digits = facts[:, 0]
        here = (digits != NO_DIGIT) & (digits != IGNORED)
        right = (self.digit_head(features)[:, : NO_DIGIT + 1].argmax(-1) == digits)[here].float().mean()
        return 0.0, loss.item(), right.item()

    def descend(self, loss: torch.Tensor) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(self.weights, 1.0)
        self.optimizer.step()
        self.step += 1
        self.update_mean()

    def token_loss(self, features: torch.Tensor, facts: torch.Tensor) -> torch.Tensor:
        """What a token should know of the digit in it; few hold one, and those without count a tenth."""
        weight = torch.ones(NO_DIGIT + 1)
        weight[NO_DIGIT] = 0.1
        logits = self.digit_head(features).split(TOKEN_CLASSES, dim=1)
        digit = functional.cross_entropy(logits[0], facts[:, 0], weight=weight)
        places = [functional.cross_entropy(one, fact) for one, fact in zip(logits[1:], facts[:, 1:].T, strict=True)]
        return digit + 0.1 * sum(places, torch.zeros(()))

    def look_loss(self, attentions: Sequence[torch.Tensor], batch: Batch) -> torch.Tensor:
        """Before it answers, a question should have attended to its digits: half of the heads, in the middle layer."""
        middle = attentions[len(attentions) // 2]  # [boards, heads, tokens, tokens]
        asking = (batch.answers != IGNORED) & (batch.answers != self.processor.tokenizer.eos_token_id)
        pictured = batch.inputs["input_ids"][0] == self.model.config.image_patch_id
        looks = middle[:, : middle.shape[1] // 2].mean(1)[asking][:, pictured]  # [boards × questions, picture tokens]
        wanted = batch.looked_at.flatten(0, 1)
        found = (looks * wanted).sum(-1)[wanted.any(-1)]
        return -found.clamp_min(1e-6).log().mean()

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
        print(f"continues at step {self.step}")


def fresh_model() -> Any:
    """Untrained; words and pixels have the same scale, so that a question is not lost in the picture."""
    config = build_config()
    model = transformers.Molmo2ForConditionalGeneration._from_config(config, attn_implementation="eager")
    with torch.no_grad():
        model.get_input_embeddings().weight.normal_(std=1.0)
    return model


def means(kind: str, losses: list[tuple[float, float, float]]) -> str:
    if not losses:
        return ""
    answer, digit, right = torch.tensor(losses).mean(0).tolist()
    return f" {kind}: loss {answer:.3f} + {digit:.3f}, right {right:.3f};"


def make_batch(processor: Any, generator: random.Random, *, boards: int, easy: bool) -> Batch:
    """Training boards of one shape, cut into at most `max_crops` crops, with questions behind each."""
    layout, sides = generator.choice(LAYOUTS), EASY_SIDES if easy else TRAINED_SIDES
    crops = EASY_CROPS if easy else TRAINED_CROPS
    max_crops = generator.choices(list(crops), weights=list(crops.values()))[0]
    drawn = [draw_board(generator, split="train", layout=layout, sides=sides) for _ in range(boards)]
    questions = [draw_questions(generator, board, count=QUESTIONS, kinds=ALL_KINDS) for board in drawn]
    seen = as_seen(processor, drawn, max_crops)
    inputs, answers = packed(processor, seen, questions)
    facts = facts_of_tokens(drawn, seen)
    return Batch(inputs=inputs, answers=answers, token_facts=facts, looked_at=tokens_to_look_at(facts, questions))


def dense_board(generator: random.Random) -> Board:
    """A board of small cells, each with a small digit; no question is asked about it."""
    cell, layout = 24, LAYOUTS[0]
    cells = itertools.product(range(layout.height // cell), range(layout.width // cell))
    digits = [dense_digit(generator, row * cell, column * cell, cell) for row, column in cells]
    return Board(layout=layout, digits=tuple(digits))


def dense_digit(generator: random.Random, top: int, left: int, cell: int) -> Digit:
    scan, side = generator.choice(TRAIN_SCANS), generator.randint(9, 22)
    top, left = top + generator.randint(0, cell - side), left + generator.randint(0, cell - side)
    row, column = (top + side // 2) * 3 // 160, (left + side // 2) * 4 // 208  # as on a board of large cells
    return Digit(value=scan_value(scan), scan=scan, row=row, column=column, top=top, left=left, side=side)


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
    """[1, 1, tokens, tokens], 0 where one token sees another; tokens of the picture all see each other."""
    prefix = len(picture)
    owner = torch.cat([torch.zeros(prefix), 1 + torch.arange(count).repeat_interleave(length)])
    place = torch.arange(len(owner))
    before = place[:, None] >= place[None, :]
    seen = before & ((owner[:, None] == owner[None, :]) | (owner[None, :] == 0))
    whole = functional.pad(picture, (0, count * length)).bool()
    seen |= whole[:, None] & whole[None, :]
    return torch.zeros(1, 1, len(owner), len(owner)).masked_fill(~seen, torch.finfo(torch.float32).min)


def facts_of_tokens(drawn: Sequence[Board], seen: dict[str, torch.Tensor]) -> torch.Tensor:
    """[boards × picture tokens, 4]: about the digit whose middle lies in the token's square, low resolution first."""
    grid = seen["image_grids"][0].tolist()
    return torch.tensor([fact for board in drawn for view in (grid[:2], grid[2:]) for fact in in_view(board, *view)])


def tokens_to_look_at(facts: torch.Tensor, questions: list[list[Question]]) -> torch.Tensor:
    """[boards, questions, picture tokens], true where a token holds a digit that gives the answer."""
    places = facts[:, 1:3].view(len(questions), -1, 2)  # [boards, picture tokens, row and column]
    wanted = torch.zeros(len(questions), len(questions[0]), places.shape[1], dtype=torch.bool)
    for board, asked in enumerate(questions):
        for number, question in enumerate(asked):
            for cell in question.cells:
                wanted[board, number] |= (places[board] == torch.tensor(cell)).all(-1)
    return wanted


def in_view(board: Board, rows: int, columns: int) -> list[tuple[int, int, int, int]]:
    """The facts of one view's tokens; a digit that has less than 5 pixels there is too small to be read."""
    facts = [(NO_DIGIT, IGNORED, IGNORED, IGNORED)] * (rows * columns)
    largest = max(digit.side for digit in board.digits)
    for digit in board.digits:
        tall, wide = rows / board.layout.height, columns / board.layout.width  # tokens a pixel
        row, column = int((digit.top + digit.side / 2) * tall), int((digit.left + digit.side / 2) * wide)
        readable = digit.side * min(tall, wide) * TOKEN_SIDE >= 5
        value = digit.value if readable else IGNORED
        facts[row * columns + column] = (value, digit.row, digit.column, int(digit.side == largest))
    return facts


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
