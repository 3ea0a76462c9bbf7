"""Writes the answer to a request to /v1/chat/completions, whole or as chunks."""

from collections.abc import Sequence
from typing import Any

import msgspec

from leyden.server.gateway.dialects.chat.request import AnswerForm
from leyden.server.gateway.dialects.custom_tools import CustomInput, custom_input
from leyden.server.gateway.dialects.openai import ChunkWriter, write_logprob
from leyden.server.gateway.dialects.types import (
    AnswerEvent,
    AnswerFinished,
    AnswerStarted,
    GenerationRequest,
    ReasoningDelta,
    TextDelta,
    ToolArgumentsDelta,
    ToolCall,
    ToolCallFinished,
    ToolCallStarted,
)


class ChatWriter(ChunkWriter):
    """Writes chat completions, whole or as chunks."""

    def __init__(self, request: GenerationRequest, form: AnswerForm, started: AnswerStarted) -> None:
        id = f"chatcmpl-{started.id}"
        super().__init__(id, "chat.completion.chunk", request.model, request.n, form.streams_usage)
        self._request, self._form = request, form
        self._inputs: dict[tuple[int, int], CustomInput] = {}
        """The inputs of the calls of custom tools, by choice and index."""

    def whole(self, events: Sequence[AnswerEvent]) -> bytes:
        """Write a `chat.completion` object."""
        choices: list[dict[str, Any]] = [
            {"index": index, "message": {"role": "assistant", "content": None}, "finish_reason": None, "logprobs": None}
            for index in range(self._request.n)
        ]
        for event in events:
            match event:
                case TextDelta(choice, text, tokens):
                    message = choices[choice]["message"]
                    message["content"] = (message["content"] or "") + text
                    if self._request.top_logprobs is not None:
                        logprobs = choices[choice]["logprobs"] = choices[choice]["logprobs"] or {"content": []}
                        logprobs["content"].extend(map(write_logprob, tokens))
                case ReasoningDelta(choice, text):
                    message = choices[choice]["message"]
                    message["reasoning_content"] = message.get("reasoning_content", "") + text
                case ToolCallFinished(choice, _, call):
                    message = choices[choice]["message"]
                    if self._form.functions:
                        message.setdefault("function_call", {"name": call.name, "arguments": call.arguments})
                    else:
                        message.setdefault("tool_calls", []).append(self._tool_call(call))
                case AnswerFinished(choice):
                    choices[choice]["finish_reason"] = self._finish_reason(event)
                    self._finished.append(event)
        for written in choices:
            if (
                written["message"]["content"] is None
                and not {"tool_calls", "function_call"} & written["message"].keys()
            ):
                written["message"]["content"] = ""
        head = {**self._head, "object": "chat.completion"}
        return msgspec.json.encode({**head, "choices": choices, "usage": self._usage()})

    def stream_start(self) -> bytes:
        """Open each choice with its role."""
        opening = {"role": "assistant", "content": ""}
        return b"".join(self._chunk(choice, opening) for choice in range(self._request.n))

    def stream_event(self, event: AnswerEvent) -> bytes:
        """Write one `chat.completion.chunk`."""
        match event:
            case TextDelta(choice, text, tokens):
                logprobs = None
                if self._request.top_logprobs is not None:
                    logprobs = {"content": [write_logprob(token) for token in tokens]}
                return self._chunk(choice, {"content": text}, logprobs=logprobs)
            case ReasoningDelta(choice, text):
                return self._chunk(choice, {"reasoning_content": text})
            case ToolCallStarted(choice, index, id, name):
                if name in self._form.custom:
                    self._inputs[choice, index] = CustomInput()
                if self._form.functions:
                    return self._function_chunk(choice, index, {"name": name, "arguments": ""})
                return self._call_chunk(choice, index, self._tool_call(ToolCall(id, name, "")))
            case ToolArgumentsDelta(choice, index, text):
                if (custom := self._inputs.get((choice, index))) is not None:
                    return self._input_chunk(choice, index, custom.feed(text))
                if self._form.functions:
                    return self._function_chunk(choice, index, {"arguments": text})
                return self._call_chunk(choice, index, {"function": {"arguments": text}})
            case ToolCallFinished(choice, index, call) if (choice, index) in self._inputs:
                return self._input_chunk(choice, index, self._inputs[choice, index].finish(call))
            case AnswerFinished(choice):
                self._finished.append(event)
                return self._chunk(choice, {}, finish=self._finish_reason(event))
        return b""

    def _usage(self) -> dict[str, Any]:
        reasoning = sum(finished.reasoning_tokens for finished in self._finished)
        return {**super()._usage(), "completion_tokens_details": {"reasoning_tokens": reasoning}}

    def _tool_call(self, call: ToolCall) -> dict[str, Any]:
        if call.name in self._form.custom:
            return {"id": call.id, "type": "custom", "custom": {"name": call.name, "input": custom_input(call)}}
        return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}

    def _finish_reason(self, finished: AnswerFinished) -> str:
        return "function_call" if self._form.functions and finished.finish == "tool_calls" else finished.finish

    def _call_chunk(self, choice: int, index: int, fields: dict[str, Any]) -> bytes:
        return self._chunk(choice, {"tool_calls": [{"index": index, **fields}]})

    def _input_chunk(self, choice: int, index: int, text: str) -> bytes:
        return self._call_chunk(choice, index, {"custom": {"input": text}}) if text else b""

    def _function_chunk(self, choice: int, index: int, fields: dict[str, Any]) -> bytes:
        """Write a part of the only call that the older form has."""
        return self._chunk(choice, {"function_call": fields}) if index == 0 else b""

    def _chunk(self, choice: int, delta: Any, finish: str | None = None, logprobs: Any = None) -> bytes:
        return self._write_chunk({"index": choice, "delta": delta, "finish_reason": finish, "logprobs": logprobs})
