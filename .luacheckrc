-- Redis functions run on Lua 5.1, without os and io.
std = {
  read_globals = {
    "assert", "error", "ipairs", "next", "pairs", "pcall", "rawequal", "rawget", "rawset", "select",
    "setmetatable", "getmetatable", "tonumber", "tostring", "type", "unpack", "xpcall",
    "math", "string", "table", "redis", "cjson", "cmsgpack", "struct", "bit", "KEYS", "ARGV",
  },
}
max_line_length = 120 -- StyLua wraps at 110 and leaves long strings alone
codes = true

-- The client joins the files into one library: each file of lua/lib is a local named after it, which the
-- files after it and those of lua/functions see.
files["lua"] = {
  read_globals = {
    "arguments", "context", "events", "groups", "placement", "refuse", "replies", "slots", "supply", "text",
    "transition", "workers",
  },
}
