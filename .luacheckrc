-- Redis functions run on Lua 5.1, without os and io.
std = {
  read_globals = {
    "assert", "error", "ipairs", "next", "pairs", "pcall", "rawequal", "rawget", "rawset", "select",
    "setmetatable", "getmetatable", "tonumber", "tostring", "type", "unpack", "xpcall",
    "math", "string", "table", "redis", "cjson", "cmsgpack", "struct", "bit", "KEYS", "ARGV",
    -- The client joins the files into one library (roq/protocol/library.py): each file of lua/lib is a local named
    -- after it, and the version and the revision are two more.
    "arguments", "batches", "cancellations", "changes", "claims", "context", "events", "groups", "judging", "leases",
    "placement", "progress", "refuse", "replies", "retire", "slots", "supply", "text", "trainers", "transition",
    "workers", "LIBRARY_VERSION",
    "LIBRARY_REVISION",
  },
}
max_line_length = 120 -- StyLua wraps at 110 and leaves long strings alone
codes = true
