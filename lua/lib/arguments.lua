-- The arguments of a function, declared by name and kind, and checked before anything else.

local M = {}

M.LARGEST_REWARD = 1e9 -- of an advantage too (roq/limits.py)

local MOST_TEXT = 65536
local NAME = "^[%w][%w%._%-]*$"

-- A whole number from 0 to 2^53, or nil.
function M.whole(value)
  local number = tonumber(value)
  if number and number >= 0 and number == math.floor(number) and number < 2 ^ 53 then
    return number + 0 -- never -0
  end
end

-- True if text is valid UTF-8, as JSON replies require. (RFC 3629, section 4.)
local function is_utf8(value)
  if not string.find(value, "[\128-\255]") then
    return true
  end
  for _, sequence in ipairs({
    "[\194-\223][\128-\191]",
    "\224[\160-\191][\128-\191]",
    "[\225-\236\238\239][\128-\191][\128-\191]",
    "\237[\128-\159][\128-\191]",
    "\240[\144-\191][\128-\191][\128-\191]",
    "[\241-\243][\128-\191][\128-\191][\128-\191]",
    "\244[\128-\143][\128-\191][\128-\191]",
  }) do
    value = string.gsub(value, sequence, "")
  end
  return not string.find(value, "[\128-\255]")
end

-- A finite number as text, since cjson would truncate it to 14 digits. Equal numbers give equal texts, 0 and -0 too.
function M.float(value)
  local number = tonumber(value)
  if number and number == number and math.abs(number) ~= math.huge then
    return string.format("%.17g", number + 0)
  end
end

-- Each kind converts text into a value, or returns nil for invalid text. There is none for flags: a function
-- takes an integer and refuses all but 0 and 1 (functions/judge.lua).
local kinds = {
  -- Bounded: reasons, locations, workers' info. Data is `bytes`, whose limit is checked by the caller.
  text = function(value)
    return #value <= MOST_TEXT and is_utf8(value) and value or nil
  end,
  bytes = function(value)
    return value
  end,
  integer = M.whole,
  -- An integer, or "" for none, which reads as -1.
  optional = function(value)
    return value == "" and -1 or M.whole(value)
  end,
  float = M.float,
  -- A worker, trainer or client: part of sorted-set members, so without blanks.
  name = function(value)
    return #value <= 128 and string.match(value, NAME) or nil
  end,
}

-- Read ARGV by a declaration such as { "worker:name", "version:integer" }.
function M.read(declared, argv)
  if #argv ~= #declared then
    refuse.with(
      "INVALID",
      "expected %d arguments (%s), got %d",
      #declared,
      table.concat(declared, " "),
      #argv
    )
  end
  local args = {}
  for i, declaration in ipairs(declared) do
    local name, kind = string.match(declaration, "^([%w_]+):(%w+)$")
    local value = kinds[kind](argv[i])
    if value == nil then
      local shown = string.gsub(string.sub(argv[i], 1, 40), "[%c\128-\255]", "?")
      local limit = kind == "text" and string.format(": UTF-8 of at most %d bytes", MOST_TEXT) or ""
      refuse.with("INVALID", "%s is not a valid %s (%s)%s", shown, kind, name, limit)
    end
    args[name] = value
  end
  return args
end

return M
