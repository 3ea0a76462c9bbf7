"""LangGraph's agent with a memory, on LangChain's OpenAI or Anthropic model."""

from conversation import add, args, finish, questions, system
from langchain.agents import create_agent
from langgraph.checkpoint.memory import InMemorySaver

if args.dialect == "messages":
    from langchain_anthropic import ChatAnthropic

    model = ChatAnthropic(model="agent", max_tokens=500, streaming=args.stream)
else:
    from langchain_openai import ChatOpenAI

    model = ChatOpenAI(model="agent", streaming=args.stream, use_responses_api=args.dialect == "responses")

agent = create_agent(model, tools=[add], system_prompt=system, checkpointer=InMemorySaver())
thread = {"configurable": {"thread_id": "1"}}
answers = []
for question in questions:
    asked = {"messages": [{"role": "user", "content": question}]}
    if args.stream:
        for _ in agent.stream(asked, thread, stream_mode="messages"):
            pass
        answers.append(agent.get_state(thread).values["messages"][-1].text)
    else:
        answers.append(agent.invoke(asked, thread)["messages"][-1].text)
finish(answers)
