"""Google's Gemini API: `generateContent`, its stream, token counts and models.

`contents` reads a conversation, `request` the parameters, tools and schemas; `writer` writes answers and errors.
"""
