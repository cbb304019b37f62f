"""``roq board``: a web dashboard of a run, live or from an archive.

The server (:mod:`roq.board.app`) serves ``static/`` and forwards the run's events as server-sent events, from
one reader for all pages (:mod:`roq.board.feed`). The page computes its state by replaying the events
(``static/state.js``), both live and in a replay. If the run's first events were trimmed, the page starts from
a picture of the state in Redis (:mod:`roq.board.picture`).
"""
