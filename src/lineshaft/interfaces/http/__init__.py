"""The HTTP API. docs/http.md is for those who call it; `routing` explains how a call is answered."""
