"""langchain-openai: messages, streams, structured output all three ways, tools and an agent."""

from __future__ import annotations

import pytest
from asked import PARIS, City
from langchain.agents import create_agent
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from running import KEY, MODEL, Penstock


@tool
def weather(town: str) -> str:
    """Tell the weather in a town."""
    return f"It is sunny in {town}."


@pytest.fixture
def llm(penstock: Penstock) -> ChatOpenAI:
    return ChatOpenAI(model=MODEL, base_url=penstock.v1, api_key=KEY, max_retries=0, max_tokens=200, temperature=0)


def test_invoke_stream_and_batch_agree(llm: ChatOpenAI) -> None:
    said = llm.invoke("What is the capital of France?")
    assert "Paris" in said.content and said.usage_metadata["output_tokens"] > 0
    assert "".join(piece.content for piece in llm.stream("What is the capital of France?")) == said.content
    assert [answer.content for answer in llm.batch(["What is the capital of France?"] * 2)] == [said.content] * 2


@pytest.mark.parametrize("method", ["json_schema", "json_mode", "function_calling"])
def test_structured_output(llm: ChatOpenAI, method: str) -> None:
    found = llm.with_structured_output(City if method != "json_mode" else None, method=method).invoke(PARIS)
    assert isinstance(found, City if method != "json_mode" else dict)


def test_bound_tools_and_their_results(llm: ChatOpenAI) -> None:
    bound = llm.bind_tools([weather])
    assert isinstance(bound.invoke("How is the weather in Paris?"), AIMessage)
    call = {"name": "weather", "args": {"town": "Paris"}, "id": "call_1"}
    messages = [HumanMessage("How is the weather in Paris?"), AIMessage("", tool_calls=[call])]
    answer = bound.invoke([*messages, ToolMessage("It is sunny in Paris.", tool_call_id="call_1")])
    assert answer.content or answer.tool_calls


@pytest.mark.parametrize("choice", ["any", "weather"])
def test_a_forced_call(llm: ChatOpenAI, choice: str) -> None:
    answer = llm.bind_tools([weather], tool_choice=choice, parallel_tool_calls=False).invoke("How is the weather in Paris?")
    assert [call["name"] for call in answer.tool_calls] == ["weather"]
    assert isinstance(answer.tool_calls[0]["args"]["town"], str)


def test_an_agent_comes_to_an_end(llm: ChatOpenAI) -> None:
    agent = create_agent(llm, [weather])
    ended = agent.invoke({"messages": [HumanMessage("How is the weather in Paris?")]}, {"recursion_limit": 12})
    assert isinstance(ended["messages"][-1], AIMessage)
