"""The package index that this machine is set up to use, told to both pip and uv.

uv does not read pip's configuration, and pip does not read uv's; whichever of the two the user
configured is handed on to the other through its environment variables.
"""

from __future__ import annotations  # this file runs under any Python >= 3.8

import configparser
import os
import pathlib
import re
import sys
from typing import Mapping
from urllib.parse import unquote, urlsplit

_LISTS = ("extra-index-url", "find-links", "trusted-host")
_SUPPORT = "Library/Application Support/pip/pip.conf"  # macOS
SYSTEM_FILES = ("/" + _SUPPORT, "/etc/pip.conf", os.path.join(sys.prefix, "pip.conf"))


def pip_config_files(env: Mapping[str, str], home: pathlib.Path) -> list[pathlib.Path]:
    """The files pip reads, in the order in which a later one overrides an earlier one."""
    if env.get("PIP_CONFIG_FILE") == os.devnull:
        return []
    config_home = pathlib.Path(env.get("XDG_CONFIG_HOME") or home / ".config")
    site_dirs = [entry for entry in env.get("XDG_CONFIG_DIRS", "/etc/xdg").split(":") if entry]
    files = [pathlib.Path(entry) / "pip" / "pip.conf" for entry in site_dirs]
    files += [pathlib.Path(entry) for entry in SYSTEM_FILES]
    files += [home / ".pip" / "pip.conf", home / _SUPPORT, config_home / "pip" / "pip.conf"]
    if env.get("PIP_CONFIG_FILE"):
        files.append(pathlib.Path(env["PIP_CONFIG_FILE"]))
    return files


def pip_settings(env: Mapping[str, str], home: pathlib.Path) -> dict[str, str]:
    """pip's own settings, by option name: the files, then PIP_* variables over them."""
    settings: dict[str, str] = {}
    for path in pip_config_files(env, home):
        parser = configparser.RawConfigParser()
        try:
            parser.read(str(path), encoding="utf-8")
        except (configparser.Error, OSError, UnicodeDecodeError) as error:
            print(f"setup: skipping {path}, which pip could not read either: {error}")
            continue
        for section in ("global", "install", "download"):
            if parser.has_section(section):
                items = parser.items(section)
                settings.update({name.replace("_", "-"): value for name, value in items})
    for name, value in env.items():
        if name.startswith("PIP_") and value:
            settings[name[4:].lower().replace("_", "-")] = value
    return settings


def _is_there(location: str) -> bool:
    """False for a local folder that is missing: pip skips it, uv would stop at it."""
    parts = urlsplit(location)
    if parts.scheme == "file":
        return os.path.exists(unquote(parts.path))
    return bool(parts.scheme) or os.path.exists(os.path.expanduser(location))


def _uv_is_configured(env: Mapping[str, str], home: pathlib.Path) -> bool:
    config_home = pathlib.Path(env.get("XDG_CONFIG_HOME") or home / ".config")
    files = [config_home / "uv" / "uv.toml", pathlib.Path("/etc/uv/uv.toml")]
    if env.get("UV_CONFIG_FILE"):
        files.append(pathlib.Path(env["UV_CONFIG_FILE"]))
    words = re.compile(r"^\s*(\[+\s*)?(pip\.)?(\w+-)?(index|find-links)", re.MULTILINE)
    return any(path.is_file() and words.search(path.read_text("utf-8")) for path in files)


def uv_environment(env: Mapping[str, str], home: pathlib.Path) -> dict[str, str]:
    """The variables that make uv use the index pip would; what uv was told already stays."""
    settings = pip_settings(env, home)
    lists = {name: settings.get(name, "").split() for name in _LISTS}
    extra = list(filter(_is_there, lists["extra-index-url"]))
    links = list(filter(_is_there, lists["find-links"]))
    told: dict[str, str] = {}

    def tell(name: str, value: str | None, *synonyms: str) -> None:
        if value and not any(env.get(known) for known in (name, *synonyms)):
            told[name] = value

    if not _uv_is_configured(env, home):
        tell("UV_DEFAULT_INDEX", settings.get("index-url"), "UV_INDEX_URL")
        tell("UV_INDEX", " ".join(extra), "UV_EXTRA_INDEX_URL")
        tell("UV_FIND_LINKS", ",".join(links))
        # As pip does: all indexes are equal. The hashes of the lock say which file is meant.
        tell("UV_INDEX_STRATEGY", "unsafe-best-match" if extra else None)
    tell("UV_INSECURE_HOST", " ".join(lists["trusted-host"]))
    tell("UV_HTTP_TIMEOUT", settings.get("timeout") or settings.get("default-timeout"))
    tell("SSL_CERT_FILE", settings.get("cert"))
    tell("SSL_CLIENT_CERT", settings.get("client-cert"))
    for name in ("HTTP_PROXY", "HTTPS_PROXY"):
        tell(name, settings.get("proxy"), name.lower(), "ALL_PROXY", "all_proxy")
    return told


def uv_arguments(env: Mapping[str, str], home: pathlib.Path) -> list[str]:
    """What uv has no variable for: a machine that installs from its own files only."""
    no_index = pip_settings(env, home).get("no-index", "").lower()
    return ["--no-index"] if no_index in ("1", "true", "yes", "on") else []


def pip_environment(env: Mapping[str, str], home: pathlib.Path) -> dict[str, str]:
    """The variables that make pip use the index uv was told of, where pip was told of none."""
    settings = pip_settings(env, home)
    synonyms = {
        "index-url": ("UV_DEFAULT_INDEX", "UV_INDEX_URL"),
        "extra-index-url": ("UV_INDEX", "UV_EXTRA_INDEX_URL"),
        "find-links": ("UV_FIND_LINKS",),
        "cert": ("SSL_CERT_FILE",),
    }
    told: dict[str, str] = {}
    for option, names in synonyms.items():
        value = next((env[name] for name in names if env.get(name)), None)
        if value and not settings.get(option):
            separator = "," if option == "find-links" else None
            # uv's NAME=URL form names an index; pip knows no names.
            urls = [re.sub(r"^[\w-]+=(?=\w+:)", "", word) for word in value.split(separator)]
            told["PIP_" + option.upper().replace("-", "_")] = " ".join(urls)
    return told


def describe(env: Mapping[str, str], home: pathlib.Path) -> str:
    """The index in a few words for an error message, without its password."""
    url = (
        env.get("UV_DEFAULT_INDEX")
        or env.get("UV_INDEX_URL")
        or pip_settings(env, home).get("index-url")
    )
    if not url:
        return "the default package index"
    return "the package index " + re.sub(r"//[^/@]*@", "//***@", url)
