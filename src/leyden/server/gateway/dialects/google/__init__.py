"""Google's Gemini API: `generateContent`, its stream, token counts and models.

`contents` reads a conversation, `request` the parameters, `schemas` tools and schemas; `writer` writes answers.
"""
