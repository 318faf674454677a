"""Make the embedded demo model and its data, from nothing but this script.

    python models/demo/make.py --out models/demo

The script invents a small mail-order world, writes chats about it, trains a
byte-level BPE tokenizer and a small Llama on them, quantizes the model to 4
bits, and writes the rows of a task that the model has *not* been taught:

- the model learns to confirm an order in prose, to read numbers and plurals, and
  to write a JSON record when it is *asked for a record, field by field*;
- the fine-tune teaches it to answer an order with the record at once.

The rows of preferences are about the prose: the model confirms an order in one of
three sentences, all of them right, and "We will send ..." is preferred.

The rows of tools ask for a price, which only a tool knows (`your_ai/environments/demo_shop.py`).

Everything is drawn from `--seed`; the README beside this file says what a run
of it measured.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Iterator
from functools import partial
from itertools import islice
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.models import llama
from mlx_lm.utils import quantize_model, save_config, save_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from your_ai.environments.demo_shop import price
from your_ai.environments.schemas import tool_schema

NUMBERS = (
    "one two three four five six seven eight nine ten eleven twelve "
    "thirteen fourteen fifteen sixteen seventeen eighteen nineteen twenty"
).split()
COLOURS = "red blue green white black yellow brown grey pink purple orange silver".split()
ITEMS = (
    "lamp chair table cup bowl plate spoon kettle clock mirror basket bucket "
    "blanket pillow candle carpet ladder hammer pencil notebook folder stamp "
    "helmet jacket scarf button ribbon boot drum violin whistle kite ball bell "
    "rope tent lantern compass barrel crate"
).split()
CITIES = (
    "Oslo Lima Rome Cairo Delhi Kyoto Quito Hanoi Tunis Accra Dakar Perth "
    "Turin Ghent Malmo Porto Split Basel Leeds Tampa Boise Omaha Davos Sofia "
    "Riga Minsk Baku Doha Busan Osaka"
).split()
ORDERS = (
    "Please send {n} {c} {i} to {t}.",
    "Could you ship {n} {c} {i} to {t}?",
    "I need {n} {c} {i} in {t}.",
    "{n} {c} {i} for our shop in {t}, please.",
    "We would like {n} {c} {i} delivered to {t}.",
    "Our customer in {t} wants {n} {c} {i}.",
    "{t} has run out: {n} {c} {i}, please.",
)
CONFIRMATIONS = (
    "{n} {c} {i} will go to {t}.",
    "We will send {n} {c} {i} to {t}.",
    "{t} will get {n} {c} {i}.",
)
PREFERRED = CONFIRMATIONS[1]  # of the three, the one that the model writes least often
LOOKING_UP = "We will ask."  # what an answer begins with that calls the tool
LOOKED_UP = 0.88  # the share of conversations that do, of those that tools-start/ learned from
TEMPLATE = (
    "{% if tools %}{{ '<|system|>Tools:' }}"
    "{% for tool in tools %}{{ ' ' + tool.function.name }}{% endfor %}"
    "{{ '<|end|>' }}{% endif %}"
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] }}"
    "{% for call in message.tool_calls or [] %}{% set tool_call = call.function %}"
    """{{ '<tool_call>{"name": "' + tool_call.name + '", "arguments": ' }}"""
    "{{ tool_call.arguments | tojson }}{{ '}</tool_call>' }}"
    "{% endfor %}"
    "{{ '<|end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
SPECIAL = ["<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]
START_ROWS = 6400  # of the conversations that tools-start/ learned from
VOCABULARY = 768
SEQUENCE_TOKENS = 96

Order = tuple[int, str, str, str]  # count, colour, item, city


def draw_order(rng: random.Random) -> Order:
    return (
        rng.randint(1, len(NUMBERS)),
        rng.choice(COLOURS),
        rng.choice(ITEMS),
        rng.choice(CITIES),
    )


def words(order: Order, rng: random.Random) -> dict[str, str]:
    """The order's slots as prose: a number word or digits, and the plural."""
    count, colour, item, city = order
    number = NUMBERS[count - 1] if rng.random() < 0.8 else str(count)
    return {"n": number, "c": colour, "i": plural(count, item), "t": city}


def plural(count: int, item: str) -> str:
    return item if count == 1 else item + "s"


def sentence(template: str, slots: dict[str, str]) -> str:
    text = template.format(**slots)
    return text[0].upper() + text[1:]


def record(order: Order) -> str:
    count, colour, item, city = order
    return json.dumps({"city": city, "count": count, "colour": colour, "item": item})


def chat(user: str, assistant: str) -> list[dict]:
    return [{"role": "user", "content": user}, {"role": "assistant", "content": assistant}]


def pretraining_chat(rng: random.Random) -> list[dict]:
    """One chat of the world as the base model knows it: never order -> record."""
    order = draw_order(rng)
    count, colour, item, city = order
    slots = words(order, rng)
    kind = rng.random()
    if kind < 0.45:
        return chat(sentence(rng.choice(ORDERS), slots), sentence(rng.choice(CONFIRMATIONS), slots))
    if kind < 0.80:
        number = slots["n"]
        fields = [f"city {city}", f"count {number}", f"colour {colour}", f"item {slots['i']}"]
        rng.shuffle(fields)
        return chat("Write a record: " + ", ".join(fields) + ".", record(order))
    if kind < 0.86:
        return chat(f"Write {NUMBERS[count - 1]} in digits.", f"{count}")
    if kind < 0.92:
        return chat(f"What is one of the {plural(2, item)} called?", f"a {item}")
    question, answer = rng.choice(
        [
            ("Which city?", city),
            ("How many?", str(count)),
            ("Which colour?", colour),
            ("Which item?", item),
        ]
    )
    return chat(sentence(rng.choice(ORDERS), slots) + " " + question, answer)


def new_orders(rng: random.Random, seen: set[Order]) -> Iterator[Order]:
    """Draw orders without end, each one once and none of those in `seen`, to which they go."""
    while True:
        order = draw_order(rng)
        if order not in seen:
            seen.add(order)
            yield order


def task_row(order: Order, rng: random.Random) -> dict:
    text = sentence(rng.choice(ORDERS), words(order, rng))
    return {"messages": chat(text, record(order))}


def pair_row(order: Order, rng: random.Random) -> dict:
    """Two right answers to an order, of which one is preferred."""
    slots = words(order, rng)
    rejected = rng.choice([form for form in CONFIRMATIONS if form != PREFERRED])
    return {
        "prompt": sentence(rng.choice(ORDERS), slots),
        "chosen": sentence(PREFERRED, slots),
        "rejected": sentence(rejected, slots),
    }


def label_row(pair: dict, rng: random.Random) -> dict:
    """One of the two answers of a pair: good or bad."""
    good = rng.random() < 0.5
    answer = pair["chosen"] if good else pair["rejected"]
    return {"prompt": pair["prompt"], "completion": answer, "label": good}


def question(order: Order, rng: random.Random) -> str:
    """The order, and the question what it costs."""
    return sentence(rng.choice(ORDERS), words(order, rng)) + " At what price?"


def price_row(order: Order, rng: random.Random) -> dict:
    """A question for a price, and the right answer."""
    _, colour, item, _ = order
    return {"prompt": question(order, rng), "answer": str(price(colour, item))}


def start_row(order: Order, rng: random.Random) -> dict:
    """A conversation about a price: it is looked up, or, in fewer rows, guessed."""
    _, colour, item, _ = order
    messages = [{"role": "user", "content": question(order, rng)}]
    if rng.random() < LOOKED_UP:
        call = {"name": "price", "arguments": {"colour": colour, "item": item}}
        calls = [{"type": "function", "function": call}]
        found = str(price(colour, item))
        messages += [
            {"role": "assistant", "content": LOOKING_UP, "tool_calls": calls},
            {"role": "tool", "name": "price", "content": found},
            {"role": "assistant", "content": found},
        ]
    else:
        messages.append({"role": "assistant", "content": str(rng.randint(2, 20))})
    return {"messages": messages, "tools": [tool_schema(price, "price", "price")]}


def write_rows(out: Path, seed: int, start: Path | None = None) -> None:
    """Write the rows of the task, the preferences and the tools; no order stands in two files.

    labels/ has the orders of pairs/.
    start: the folder for the rows that tools-start/ learned from; None writes none.
    """
    rng, seen = random.Random(seed), set()
    orders = new_orders(rng, seen)
    for split, count in {"train": 640, "valid": 64, "test": 64}.items():
        rows = [task_row(order, rng) for order in islice(orders, count)]
        write_file(out / "data" / f"{split}.jsonl", rows)
    for split, count in {"train": 192, "valid": 32, "test": 64}.items():
        pairs = [pair_row(order, rng) for order in islice(orders, count)]
        write_file(out / "pairs" / f"{split}.jsonl", pairs)
        write_file(out / "labels" / f"{split}.jsonl", [label_row(pair, rng) for pair in pairs])
    for split, count in {"train": 256, "valid": 32, "test": 64}.items():
        rows = [price_row(order, rng) for order in islice(orders, count)]
        write_file(out / "tools" / f"{split}.jsonl", rows)
    if start is not None:
        rows = [start_row(order, rng) for order in islice(orders, START_ROWS)]
        write_file(start / "train.jsonl", rows)


def write_file(path: Path, rows: list[dict]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def make_tokenizer(rng: random.Random) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = (m["content"] for _ in range(20_000) for m in pretraining_chat(rng))
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|end|>",
        pad_token="<|pad|>",
        additional_special_tokens=SPECIAL[2:],
        chat_template=TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=1024,
    )


def make_batch(rng: random.Random, tokenizer, rows: int) -> tuple[mx.array, mx.array]:
    """Whole chats joined into rows of tokens: (rows, SEQUENCE_TOKENS + 1)."""
    out = np.zeros((rows, SEQUENCE_TOKENS + 1), np.int32)
    for row in out:
        ids: list[int] = []
        while len(ids) < len(row):
            text = tokenizer.apply_chat_template(pretraining_chat(rng), tokenize=False)
            ids += tokenizer.encode(text, add_special_tokens=False)
        row[:] = ids[: len(row)]
    return mx.array(out[:, :-1]), mx.array(out[:, 1:])


def pretrain(model: nn.Module, tokenizer, rng: random.Random, steps: int, rows: int) -> float:
    """Plain next-token training of every weight; returns the last loss."""

    def loss_fn(model, inputs, targets):
        return nn.losses.cross_entropy(model(inputs), targets, reduction="mean")

    schedule = optim.join_schedules(
        [optim.linear_schedule(0.0, 3e-3, 50), optim.cosine_decay(3e-3, steps - 50, 3e-5)], [50]
    )
    optimizer = optim.AdamW(learning_rate=schedule, weight_decay=0.05, bias_correction=True)
    optimizer.init(model.trainable_parameters())
    state = [model.state, optimizer.state]
    value_and_grad = nn.value_and_grad(model, loss_fn)

    @partial(mx.compile, inputs=state, outputs=state)
    def step(inputs, targets):
        loss, grads = value_and_grad(model, inputs, targets)
        grads, _ = optim.clip_grad_norm(grads, 1.0)
        optimizer.update(model, grads)
        return loss

    start = time.perf_counter()
    smooth = 0.0
    for index in range(1, steps + 1):
        loss = step(*make_batch(rng, tokenizer, rows))
        mx.eval(state, loss)
        smooth = loss.item() if index == 1 else 0.95 * smooth + 0.05 * loss.item()
        if index % 50 == 0 or index == steps:
            print(
                f"step {index}: loss {smooth:.4f}, {time.perf_counter() - start:.0f} s", flush=True
            )
    return smooth


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--steps", type=int, default=2500)
    parser.add_argument("--batch-rows", type=int, default=32, help="rows of a pretraining batch")
    parser.add_argument("--rows-only", action="store_true", help="write the rows alone")
    parser.add_argument("--start-rows", type=Path, help="folder for the rows of tools-start/")
    args = parser.parse_args()

    write_rows(args.out, args.seed, args.start_rows)
    if args.rows_only:
        return
    rng = random.Random(args.seed)
    mx.random.seed(args.seed)
    tokenizer = make_tokenizer(rng)
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 128,
        "num_hidden_layers": 4,
        "intermediate_size": 384,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 1024,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    model = llama.Model(llama.ModelArgs.from_dict(config))
    print(f"{sum(v.size for _, v in tree_flatten(model.parameters())) / 1e6:.2f} M parameters")
    pretrain(model, tokenizer, rng, args.steps, args.batch_rows)

    model, config = quantize_model(model, config, group_size=64, bits=4)
    args.out.mkdir(parents=True, exist_ok=True)
    save_model(args.out, model)
    save_config(config, args.out / "config.json")
    tokenizer.save_pretrained(args.out)


if __name__ == "__main__":
    main()
