"""``roq board``: a run as a web page, live and again afterwards.

The server (:mod:`roq.board.app`) does little: it hands out the files of ``static/`` and passes the run's
events on, as server-sent events, from one reader for all pages (:mod:`roq.board.feed`). What the page shows
is computed in the page by replaying the events (``static/state.js``), so that live and replay are the same
picture. A run whose first events were trimmed begins with a picture taken from Redis
(:mod:`roq.board.picture`).
"""
