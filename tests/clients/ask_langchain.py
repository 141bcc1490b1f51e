"""What langchain-openai makes of a server. Run by ``tests.clients`` in an environment that has it: a line for each way to ask."""

import asyncio
import sys

from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel

QUESTION = "What is the capital of France?"


class Person(BaseModel):
    """Somebody with a name and an age."""

    name: str
    age: int


def main(url: str) -> None:
    def chat(max_tokens: int, **options: object) -> ChatOpenAI:
        return ChatOpenAI(
            base_url=url,
            api_key="none",
            model="default",
            temperature=0,
            max_retries=0,
            **{"max_completion_tokens": max_tokens, **options},
        )

    answer = chat(12).invoke(QUESTION)
    print("invoke:", answer.content, answer.usage_metadata["total_tokens"], answer.response_metadata["finish_reason"])
    pieces = list(chat(12, stream_usage=True).stream(QUESTION))
    print("stream:", "|".join(piece.content for piece in pieces))
    print("usage of the stream:", [p.usage_metadata["total_tokens"] for p in pieces if p.usage_metadata])
    print("batch:", [each.content for each in chat(12).batch([QUESTION, QUESTION])])

    async def ask() -> str:
        return "".join([piece.content async for piece in chat(12).astream(QUESTION)])

    print("astream:", asyncio.run(ask()))
    said = [SystemMessage("Be short."), HumanMessage("Hi"), AIMessage("Hello!")]
    print("messages:", chat(12).invoke([*said, HumanMessage([{"type": "text", "text": QUESTION}])]).content)
    for method in ("json_schema", "function_calling", "json_mode"):
        asked = chat(60).with_structured_output(Person, method=method)
        print(f"{method}:", asked.invoke("Anna is 34. Say so in JSON, with name and age."))
    for choice in ("Person", "any"):
        [call] = chat(60).bind_tools([Person], tool_choice=choice).invoke("Anna is 34 years old.").tool_calls
        print(f"tool_choice {choice}:", call["name"], call["args"])
    try:
        print("tool_choice auto:", chat(12).bind_tools([Person]).invoke("Hi"))
    except Exception as error:  # noqa: BLE001  what it is, is printed
        print("tool_choice auto:", error)
    told = chat(1, logprobs=True, top_logprobs=2).invoke(QUESTION).response_metadata["logprobs"]["content"]
    print("logprobs:", [(each["token"], len(each["top_logprobs"])) for each in told])
    completion = OpenAI(base_url=url, api_key="none", model="default", temperature=0, max_tokens=2)
    print("completion:", completion.invoke("The capital of France is"))


if __name__ == "__main__":
    main(sys.argv[1])
