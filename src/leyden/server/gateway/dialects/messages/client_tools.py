"""Tools that Anthropic's models know and the agent runs: a shell, an editor, a memory of files.

A request names only their type, so what Anthropic's service tells its models about them is told to the model here.
"""

import re
from typing import Any

_COMMANDS = {
    "view": "show the file or list the directory at `path`; `view_range` limits it to lines",
    "create": "write `file_text` to a new file at `path`",
    "str_replace": "replace `old_str`, which must occur exactly once in the file, by `new_str`",
    "insert": "insert `insert_text` after the line `insert_line`, or at the beginning if that is 0",
    "delete": "delete the file or directory at `path`",
    "rename": "move `old_path` to `new_path`",
    "undo_edit": "revert the last edit of the file at `path`",
}
_FIELDS: dict[str, dict[str, Any]] = {
    **{name: {"type": "string"} for name in ("path", "file_text", "old_str", "new_str", "insert_text")},
    "insert_line": {"type": "integer"},
    "view_range": {"type": "array", "items": {"type": "integer"}, "description": "First and last line; -1 is the end"},
    **{name: {"type": "string"} for name in ("old_path", "new_path")},
}
_EDITING = ("view", "create", "str_replace", "insert")
_EDITOR = re.compile(r"text_editor_(\d{8})").fullmatch


def client_tool(kind: str) -> tuple[str, dict[str, Any]] | None:
    """Return description and schema of a tool that the agent runs; None for a type that is not known here."""
    if kind.startswith("bash_"):
        command = {"type": "string", "description": "The command to run"}
        restart = {"type": "boolean", "description": "Whether to restart the shell, in place of a command"}
        schema = {"type": "object", "properties": {"command": command, "restart": restart}}
        return "Run commands in a bash shell that stays open between calls.", schema
    if kind.startswith("memory_"):
        about = "Read and write files beneath /memories, which stay between conversations. Look there first."
        return _file_tool(about, (*_EDITING, "delete", "rename"))
    if (editor := _EDITOR(kind)) is not None:
        commands = _EDITING if editor[1] >= "20250429" else (*_EDITING, "undo_edit")
        return _file_tool(
            "View, create and edit text files.", commands, "insert_text" if editor[1] >= "20250728" else "new_str"
        )
    return None


def _file_tool(about: str, commands: tuple[str, ...], inserted: str = "insert_text") -> tuple[str, dict[str, Any]]:
    """Describe a tool with these commands; `inserted` is the field of the text that `insert` inserts."""
    lines = [f"- {name}: {_COMMANDS[name]}".replace("insert_text", inserted) for name in commands]
    fields = {name: field for name, field in _FIELDS.items() if any(f"`{name}`" in line for line in lines)}
    properties = {"command": {"type": "string", "enum": list(commands)}, **fields}
    required = ["command"] if "rename" in commands else ["command", "path"]
    schema = {"type": "object", "properties": properties, "required": required}
    return "\n".join([about, "Commands:", *lines]), schema
