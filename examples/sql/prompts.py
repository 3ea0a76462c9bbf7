"""What the three roles are told. They begin alike, so that a server with a prefix cache reads the schema once."""

from langchain_core.prompts import ChatPromptTemplate

SYSTEM = """A SQLite database has these tables, each with its first rows:

{schema}

"""
INSTRUCTIONS = {
    "writer": "You are the writer. Write one SQLite query that answers the user's question with exactly the columns "
    "that it asks for, no more and no fewer. Reply with only the query, in a ```sql block.",
    "checker": "You are the checker. Judge whether a query answers the user's question: look at its tables, joins, "
    "conditions, columns and order, and at what it returned. Say in one or two sentences what is wrong, if anything. "
    "Then end with one line: VERDICT: CORRECT or VERDICT: WRONG.",
    "rewriter": "You are the rewriter. The query of a colleague does not answer the user's question. Write one SQLite "
    "query that does, with exactly the columns that it asks for. Reply with only the query, in a ```sql block.",
}
REQUESTS = {
    "writer": "Question: {question}",
    "checker": "Question: {question}\n\nQuery:\n{query}\n\nIt returned:\n{outcome}",
    "rewriter": "Question: {question}\n\nQuery:\n{query}\n\nIt returned:\n{outcome}\n\nThe checker said:\n{criticism}",
}
PROMPTS = {
    role: ChatPromptTemplate([("system", SYSTEM + INSTRUCTIONS[role]), ("human", REQUESTS[role])]) for role in REQUESTS
}
