"""`domino-draft chat`: what the target is asked, what is kept, what is said."""

import json

import pytest
from domino_draft import NgramDrafter, Target, generate
from domino_draft.chat import Chat
from domino_draft.smollm2 import chat_prompt, chat_text
from transformers import AutoTokenizer

from .conftest import tiny_model
from .test_cli import invoke


@pytest.fixture
def target(tokenizer):
    return Target(tiny_model("Llama", vocab_size=len(tokenizer)), tokenizer)


def expected(target, turns, count, **settings):
    ids = chat_prompt(target.tokenizer, turns)
    out = generate(target, None, [ids], max_new_tokens=count, **settings).sequences[0]
    return target.tokenizer.decode(out, skip_special_tokens=True)


def turn(role, content):
    return {"role": role, "content": content}


@pytest.mark.parametrize("system", [None, "short"])
def test_every_answer_sees_all_turns(target, system):
    talk = Chat(target, NgramDrafter(), max_new_tokens=9, system=system)
    turns = [turn("system", system)] if system else []
    for text in ("Hi", "and then?"):
        turns.append(turn("user", text))
        want = expected(target, turns, 9)
        assert "".join(talk.answer(text)) == want
        turns.append(turn("assistant", want))
        assert talk.turns == turns
        assert talk.stats.tokens == 9
        assert talk.context == len(chat_prompt(target.tokenizer, turns[:-1]))
    talk.reset()
    assert "".join(talk.answer("Hi")) == expected(target, [*turns[: bool(system)], turns[-4]], 9)


def test_equal_turns_draw_different_noise(target):
    talk = Chat(target, None, max_new_tokens=9, temperature=1.0, seed=4)
    first = "".join(talk.answer("Hi"))
    turns = [turn("user", "Hi"), turn("assistant", first), turn("user", "Hi")]
    assert first == expected(target, turns[:1], 9, temperature=1.0, seed=4)
    assert "".join(talk.answer("Hi")) == expected(target, turns, 9, temperature=1.0, seed=5)


def test_a_broken_off_answer_stays_as_far_as_it_came(target):
    talk = Chat(target, None, max_new_tokens=9)
    pieces = talk.answer("Hi")
    start = next(pieces)
    pieces.close()
    assert talk.turns[-1] == turn("assistant", start)


def test_one_engine_answers_until_it_is_too_small(target, monkeypatch):
    target.model.config.max_position_embeddings = 4096
    talk = Chat(target, NgramDrafter(), max_new_tokens=9)
    turns, engines, others = [], [], []
    for text in ("Hi", "word " * 150, "and?", "word " * 250):
        others += [talk.answer("not begun"), talk.answer("begun")]
        next(others[-1])
        pieces = talk.answer(text)
        turns.append(turn("user", text))
        said = "".join(pieces)
        assert said == expected(target, turns, 9)
        turns.append(turn("assistant", said))
        others.clear()
        assert talk.turns == turns and not talk._engine.num_running
        engines.append(talk._engine)
    assert engines[0] is engines[1] is engines[2] is not engines[3]
    assert [engine.max_length for engine in engines[2:]] == [1024, 4096]  # the latter the target's


def test_after_an_interrupt_the_next_answer_is_right(target, monkeypatch):
    talk = Chat(target, None, max_new_tokens=9)
    pieces = talk.answer("Hi")
    said = next(pieces)
    monkeypatch.setattr(
        talk._engine, "_deliver", lambda *a, **k: (_ for _ in ()).throw(KeyboardInterrupt)
    )
    with pytest.raises(KeyboardInterrupt):
        next(pieces)
    turns = [turn("user", "Hi"), turn("assistant", said), turn("user", "and?")]
    assert talk.turns == turns[:2]
    assert "".join(talk.answer("and?")) == expected(target, turns, 9)


QWEN = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system here') }}"
    "{% endif %}{{ m.content }}{% endfor %}A{% if enable_thinking is defined and not "
    "enable_thinking %}(no){% elif enable_thinking is defined %}(yes){% endif %}"
)


def test_templates_are_told_of_thinking_and_may_refuse(folders, tmp_path, tokenizer):
    place, drafter = folders
    ids = tokenizer("A")["input_ids"]
    (tmp_path / "target" / "chat_template.jinja").write_text(QWEN)
    common = ["--target", place, "--drafter", drafter, "--device", "cpu", "-n", 3]
    told = tuple(
        chat_text(AutoTokenizer.from_pretrained(place), "Q", t) for t in (None, True, False)
    )
    assert told == ("QA", "QA(yes)", "QA(no)")
    answers = [
        json.loads(invoke("generate", "Q", *common, *option, "--json").stdout)["outputs"][0]
        for option in ([], ["--no-thinking"], ["--raw"])
    ]
    raw = json.loads(invoke("generate", "QA(no)", *common, "--raw", "--json").stdout)["outputs"][0]
    assert answers[1]["tokens"] == raw["tokens"] != answers[0]["tokens"]
    said = json.loads(invoke("chat", *common, "--no-thinking", "--json", input="Q\n").stdout)
    assert said["assistant"] == raw["text"] and said["stats"]["context"] == 5 + len(ids)
    done = invoke("chat", *common, "--system", "short", input="Q\n")
    assert done.exit_code == 1 and "template takes: no system here" in done.stderr
    (tmp_path / "target" / "chat_template.jinja").unlink()
    done = invoke("generate", "Q", *common)
    assert done.exit_code == 1 and "without a chat template" in done.stderr
    assert invoke("generate", "Q", *common, "--raw").exit_code == 0


def test_a_turn_that_does_not_fit_is_not_taken(target):
    talk = Chat(target, None, max_new_tokens=9)
    with pytest.raises(ValueError, match="expected at most 256 positions"):
        talk.answer("word " * 60)
    assert talk.turns == []


def test_piped_turns(folders, tokenizer, target):
    place, drafter = folders
    common = ["chat", "--target", place, "--drafter", drafter, "--device", "cpu", "-n", 6]
    done = invoke(*common, "--json", input="Hi\n\nand?\n/reset\nHi\n/exit\nnever\n")
    assert done.exit_code == 0, done.output
    said = [json.loads(line) for line in done.stdout.splitlines()]
    assert [row["user"] for row in said] == ["Hi", "and?", "Hi"]
    first = expected(target, "Hi", 6)
    assert said[0]["assistant"] == said[2]["assistant"] == first
    turns = [turn("user", "Hi"), turn("assistant", first), turn("user", "and?")]
    assert said[1]["assistant"] == expected(target, turns, 6)
    assert said[1]["stats"]["context"] == len(chat_prompt(tokenizer, turns))
    assert said[1]["stats"]["tokens"] == 6

    text = invoke(*common, input="Hi\nand?\n")
    assert text.stdout == "".join(row["assistant"] + "\n" for row in said[:2])
    assert text.stderr.count("accepted length") == text.stderr.count("context") == 2
    long = invoke(*common, input="word " * 60)
    assert long.exit_code == 1 and "expected at most 256 positions" in long.stderr
    assert invoke(*common, input="").exit_code == 0


def test_terminal(folders, monkeypatch):
    """A turn that does not fit is said to be so, and the conversation goes on until the end."""
    place, drafter = folders
    lines = iter(["word " * 60, "", "Hi"])

    def typed(prompt):
        try:
            return next(lines)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr("builtins.input", typed)
    monkeypatch.setattr("click.testing._NamedTextIOWrapper.isatty", lambda self: True)
    done = invoke("chat", "--target", place, "--drafter", drafter, "--device", "cpu", "-n", 4)
    assert done.exit_code == 0, done.output
    assert "/reset forgets" in done.stderr and done.stderr.count("accepted length") == 1
