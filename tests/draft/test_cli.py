import json
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from domino_draft import Target, generate
from domino_draft.cli import main
from domino_draft.demo import Row, table
from domino_draft.loading import TextStream
from domino_draft.smollm2 import chat_prompt

from .conftest import tiny_model
from .tokens import chat_tokenizer


def invoke(*args, **options):
    return CliRunner().invoke(main, [str(a) for a in args], **options)


def own_text(folder, tokenizer, text, count):
    target = Target(tiny_model("Llama", vocab_size=len(tokenizer)), tokenizer)
    ids = chat_prompt(tokenizer, text)
    out = generate(target, None, [ids], max_new_tokens=count, stop_token_ids=()).sequences[0]
    return out


@pytest.mark.parametrize("drafter", ["folder", "ngram", "none"])
def test_generate_gives_the_own_text_of_the_target(folders, tokenizer, drafter):
    target, folder = folders
    drafter = folder if drafter == "folder" else drafter
    done = invoke("generate", "Hi", "--target", target, "--drafter", drafter, "--device", "cpu",
                  "-n", 12, "--json")  # fmt: skip
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    expected = own_text(target, tokenizer, "Hi", 12)
    assert found["outputs"][0]["tokens"] == expected
    assert found["outputs"][0]["text"] == tokenizer.decode(expected, skip_special_tokens=True)
    assert found["outputs"][0]["finish"] == "length" and found["stats"]["tokens"] == 12


def test_generate_reads_files_and_the_standard_input(folders, tmp_path):
    target, drafter = folders
    common = ["--target", target, "--drafter", drafter, "--device", "cpu", "-n", 4]
    (tmp_path / "prompts.txt").write_text("one\n\ntwo\n")
    done = invoke("generate", "--file", tmp_path / "prompts.txt", *common, "--json")
    both = [row["tokens"] for row in json.loads(done.stdout)["outputs"]]
    piped = invoke("generate", *common, "--json", input="two\n")
    assert len(both) == 2 and json.loads(piped.stdout)["outputs"][0]["tokens"] == both[1]
    text = invoke("generate", "two", *common)
    assert text.stdout == json.loads(piped.stdout)["outputs"][0]["text"] + "\n"
    assert "accepted length" in text.stderr


def test_a_line_that_does_not_fit_fails_alone(folders, tmp_path, tokenizer):
    target, drafter = folders
    (tmp_path / "p.txt").write_text("one\n" + "word " * 80 + "\ntwo\nthree\n")
    command = ["generate", "--file", tmp_path / "p.txt", "--target", target, "--drafter", drafter,
               "--device", "cpu", "-n", 5, "--batch-size", 2, "--num-drafts", "auto"]  # fmt: skip
    done = invoke(*command, "--json")
    assert done.exit_code == 1 and "prompt 1: add: prompt: got 417 tokens" in done.stderr
    rows = json.loads(done.stdout)["outputs"]
    assert [row["finish"] for row in rows] == ["length", "error", "length", "length"]
    assert "at most 256 positions" in rows[1]["error"] and rows[1]["tokens"] == []
    for i, text in ((0, "one"), (2, "two"), (3, "three")):
        assert rows[i]["tokens"] == own_text(target, tokenizer, text, 5)
    text = invoke(*command)
    assert text.exit_code == 1
    assert text.stdout == "".join(f"--- {i}\n{row['text']}\n" for i, row in enumerate(rows))


@pytest.mark.parametrize("stop", [False, True], ids=["all", "head"])
def test_answers_go_to_stdout_alone(folders, tmp_path, stop):
    """With a bar on stderr too; and a reader that has gone is no error to report."""
    (tmp_path / "p.txt").write_text("one\n" * (4000 if stop else 3))
    command = [sys.executable, "-m", "domino_draft.cli", "generate", "--file", tmp_path / "p.txt",
               "--target", folders[0], "--drafter", "none", "--device", "cpu", "-n", "1",
               "--batch-size", "64"]  # fmt: skip
    ours, theirs = os.openpty()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=theirs) as done:
        os.close(theirs)
        found = done.stdout.readline() if stop else done.stdout.read()
        done.stdout.close()
        shown = b""
        try:
            while part := os.read(ours, 4096):
                shown += part
        except OSError:  # the other end is closed
            pass
        os.close(ours)
    assert b"prompts" in shown and b"Error" not in shown and b"Traceback" not in shown
    assert b"--- 0" not in shown and found.startswith(b"--- 0\n")
    assert done.returncode == stop
    if not stop:
        assert found.count(b"--- ") == 3 and b"3 tokens in" in shown


def test_wrong_usage_is_exit_code_2_and_stated_errors_are_1(folders, tmp_path):
    target, drafter = folders
    assert invoke("generate", "a", "--file", __file__).exit_code == 2
    assert invoke("generate", "", "--target", target).exit_code == 2
    done = invoke("generate", "a", "--target", tmp_path / "none", "--device", "cpu")
    assert done.exit_code == 1 and "a model's folder" in done.stderr
    done = invoke("generate", "a", "--target", target, "--drafter", "x", "--device", "cpu")
    assert done.exit_code == 1 and "drafter: got 'x'" in done.stderr
    done = invoke("generate", "a", "--target", target, "--drafter", drafter, "--device", "cpu",
                  "-n", 4, "--num-drafts", 9)  # fmt: skip
    assert done.exit_code == 1 and "num_drafts: got 9" in done.stderr
    assert invoke("generate", "a", "--target", target, "--num-drafts", "few").exit_code == 2
    assert "Traceback" not in done.stderr
    done = invoke("generate", "a", "--target", target, "--device", "gpu")
    assert done.exit_code == 2 and "--device" in done.stderr
    if not torch.cuda.is_available():
        done = invoke("generate", "a", "--target", target, "--device", "cuda")
        assert done.exit_code == 1 and "Torch finds no CUDA device" in done.stderr
    done = invoke("inspect", tmp_path)
    assert done.exit_code == 1 and "no config.json" in done.stderr
    (tmp_path / "drafter" / "model.safetensors").write_bytes(b"half")
    done = invoke("inspect", drafter)
    assert done.exit_code == 1 and "cut short" in done.stderr


def test_bad_input_of_evaluate_and_regenerate_is_one_line(folders, tmp_path):
    target, _ = folders
    empty, row = tmp_path / "e.jsonl", tmp_path / "r.jsonl"
    empty.write_text("")
    row.write_text(json.dumps({"set": "s", "id": "a", "text": "", "ids": [5, 6]}))
    common = ["--target", target, "--device", "cpu", "--drafter", "ngram"]
    done = invoke("evaluate", "--prompts", empty, *common)
    assert done.exit_code == 1 and "without a prompt" in done.stderr
    done = invoke("evaluate", "--prompts", row, *common, "--json", tmp_path / "no" / "out.json")
    assert done.exit_code == 2 and "no such folder" in done.stderr
    for option, name in (("--json", "out.json"), ("--plot", "out.svg")):
        done = invoke("bench", row, *common, option, tmp_path / "no" / name)
        assert done.exit_code == 2 and "no such folder" in done.stderr
    done = invoke("evaluate", "--prompts", row, *common[:-1], "ngram@0")
    assert done.exit_code == 2 and "got 0 drafts" in done.stderr
    (tmp_path / "half.npz").write_bytes(b"PK\x03\x04")
    np.savez(tmp_path / "other.npz", tokens=np.arange(3))
    for name, message in (("half.npz", "damaged file"), ("other.npz", "offsets: missing")):
        done = invoke("regenerate", "--prompts", tmp_path / name, "--target", target,
                      "--device", "cpu", "--output", tmp_path / "o.npz", "--slots", 4,
                      "--max-length", 64)  # fmt: skip
        assert done.exit_code == 1 and message in done.stderr, done.output
    done = invoke("regenerate", "--prompts", tmp_path / "half.npz", "--target", target,
                  "--output", tmp_path / "out.npz", "--shard", 0, 0)  # fmt: skip
    assert done.exit_code == 2 and "--shard" in done.stderr


def test_evaluate_writes_the_report_and_prints_the_table(folders, tmp_path):
    target, drafter = folders
    rows = [{"set": "s", "id": f"s/{i}", "text": "", "ids": [5, 6, 7 + i]} for i in range(3)]
    (tmp_path / "p.jsonl").write_text("\n".join(map(json.dumps, rows)))
    done = invoke("evaluate", "--prompts", tmp_path / "p.jsonl", "--target", target,
                  "--drafter", f"ours={drafter}", "--drafter", "ngram",
                  "--drafter", "two=ngram@2", "--limit", 2,
                  "--device", "cpu", "-n", 8, "--num-drafts", 8,
                  "--json", tmp_path / "out.json")  # fmt: skip
    assert done.exit_code == 0, done.output
    report = json.loads((tmp_path / "out.json").read_text())
    assert report["sets"]["s"]["prompts"] == 2
    assert report["run"]["num_drafts"] == {"ours": 4, "ngram": 8, "two": 2}
    assert report["sets"]["s"]["drafters"]["ours"]["identical"] == 1.0
    assert "| s | ours |" in done.stdout and "| s | ours − ngram |" in done.stdout
    twice = ["--drafter", "ngram", "--drafter", "ngram"]
    done = invoke("evaluate", "--prompts", tmp_path / "p.jsonl", "--target", target, *twice)
    assert done.exit_code == 2 and "two drafters are called 'ngram'" in done.stderr


def test_regenerate_answers_every_prompt(folders, tmp_path, tokenizer):
    model = tiny_model("Llama", vocab_size=len(tokenizer), eos_token_id=1)
    model.save_pretrained(tmp_path / "stopping")
    tokenizer.save_pretrained(tmp_path / "stopping")
    lengths = [4, 6, 3]
    np.savez(
        tmp_path / "prompts.npz",
        tokens=np.arange(2, 15, dtype=np.uint16),
        offsets=np.cumsum([0, *lengths]),
        kind=np.zeros(3, np.uint8),
        domain=np.array([0, 1, 2], np.uint8),
    )
    done = invoke("regenerate", "--prompts", tmp_path / "prompts.npz", "--device", "cpu",
                  "--output", tmp_path / "out.npz", "--target", tmp_path / "stopping",
                  "--slots", 4, "-n", 5, "--max-length", 64)  # fmt: skip
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)  # nothing else is printed there
    assert found["prompts"] == found["responses"] == 3
    assert sorted(np.load(tmp_path / "out.npz")["prompt_lengths"].tolist()) == sorted(lengths)


def test_regenerate_without_a_stop_token_runs_to_the_end(folders, tmp_path):
    """No end-of-text id: nothing stops, where `mask[[None]] = True` had made every token a stop."""
    np.savez(
        tmp_path / "prompts.npz", tokens=np.arange(2, 6, dtype=np.uint16), offsets=[0, 4],
        kind=np.zeros(1, np.uint8), domain=np.zeros(1, np.uint8),
    )  # fmt: skip
    done = invoke("regenerate", "--prompts", tmp_path / "prompts.npz", "--device", "cpu",
                  "--output", tmp_path / "out.npz", "--target", folders[0], "--slots", 4, "-n", 5,
                  "--sampled-fraction", 0, "--max-length", 64)  # fmt: skip
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)  # nothing else is printed there
    assert (found["response_tokens"], found["finished"]) == (5, 0)


def test_train_passes_its_options_on():
    done = invoke("train", "--help")
    assert done.exit_code == 0 and "--lambda-start" in done.output
    done = invoke("train", "--no-such-option")
    assert done.exit_code == 2 and "no-such-option" in done.output


def test_help_imports_no_torch():
    code = (
        "import sys\nfrom domino_draft.cli import main\n"
        "try: main(['--help'])\nexcept SystemExit: pass\nassert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0 and "regenerate" in done.stdout, done.stderr


def test_without_the_extra_the_command_says_what_to_install():
    code = "import sys; sys.modules['click'] = None; from domino_draft.cli import main"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1 and "pip install" in done.stderr
    assert "Traceback" not in done.stderr


def test_text_stream_waits_for_whole_characters(tokenizer):
    ids = tokenizer("aé€b", add_special_tokens=False)["input_ids"]
    assert len(ids) > 4  # bytes
    shown = TextStream(tokenizer)
    pieces = [shown.push([token]) for token in ids]
    assert "".join(pieces) == "aé€b" and not any("\ufffd" in piece for piece in pieces)
    cut = TextStream(tokenizer)
    assert cut.push(ids[:-2], last=True) == "aé\ufffd"


def test_text_stream_loses_nothing_to_a_tokenizer_that_cleans_up():
    cleaning = chat_tokenizer()
    cleaning.clean_up_tokenization_spaces = True
    cleaning.clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output = True
    ids = cleaning("do n't go . no", add_special_tokens=False)["input_ids"]
    assert cleaning.decode(ids) == "don't go. no"  # shorter than what had been shown before
    shown = TextStream(cleaning)
    assert "".join(shown.push([token]) for token in ids) == "do n't go . no"


def test_a_demo_without_a_drafter_is_one_line():
    done = invoke("demo", "--drafter", "none", "--device", "cpu")
    assert done.exit_code == 1 and "drafter: got 'none'" in done.stderr


def test_demo_table_has_ratios_of_sums():
    same = dict(near_ties=None, violations=0)
    rows = [
        Row("code", 30, 10, 30, 1.0, 2.0, **same),
        Row("code", 10, 10, 10, 1.0, 2.0, **same),
        Row("math", 20, 5, 20, 2.0, 1.0, near_ties=1, violations=0),
        Row("chat", 20, 5, 20, 2.0, 1.0, near_ties=0, violations=3),
    ]
    columns = [list(column.cells) for column in table(rows).columns]
    assert columns[0] == ["code (2)", "math (1)", "chat (1)", "all (4)"]
    assert columns[1] == ["2.00", "4.00", "4.00", "2.67"]
    assert columns[4] == ["2.00x", "0.50x", "0.50x", "1.00x"]
    assert columns[5] == ["yes", "up to 1 near ties", "no: 3 tokens", "no: 3 tokens"]


def test_shell_completion():
    def asked(mode, **env):
        env = {"_DOMINO_DRAFT_COMPLETE": mode} | env
        return CliRunner().invoke(main, prog_name="domino-draft", env=env)

    assert "compdef" in asked("zsh_source").stdout
    found = asked("zsh_complete", COMP_WORDS="domino-draft be", COMP_CWORD="1").stdout
    assert "bench" in found and "chat" not in found
    found = asked("zsh_complete", COMP_WORDS="domino-draft train --arm d", COMP_CWORD="3").stdout
    assert found.split()[1::3] == ["domino", "dflash", "dflash-matched"]
    found = asked("zsh_complete", COMP_WORDS="domino-draft train --lam", COMP_CWORD="2").stdout
    assert "--lambda-start" in found


def test_completion_of_commands_imports_no_torch():
    code = (
        "import sys\nfrom domino_draft.cli import main\n"
        "try: main(prog_name='domino-draft')\nexcept SystemExit: pass\n"
        "assert 'torch' not in sys.modules"
    )
    asked = {"COMP_WORDS": "domino-draft ", "COMP_CWORD": "1"}
    env = {**os.environ, **asked, "_DOMINO_DRAFT_COMPLETE": "zsh_complete"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
    assert "train" in done.stdout and not done.stderr
