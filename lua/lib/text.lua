-- Numbers and objects as text. Lua's own conversions truncate numbers to 14 digits, and cjson writes an
-- empty array as {}, so integers go through `int`, and replies omit empty arrays.

local M = {}

-- An integer as decimal text.
function M.int(number)
  return string.format("%.0f", number)
end

-- An object as JSON.
function M.json(object)
  return cjson.encode(object)
end

-- The object in a JSON text.
function M.object(json)
  return cjson.decode(json)
end

-- An array or nil when it is empty (see above).
function M.array(items)
  if #items > 0 then
    return items
  end
  return nil
end

-- "3.2" for buffer 3, slot 2: the name of a place, as a field of `slots` and in events.
function M.place(buffer, slot)
  return M.int(buffer) .. "." .. M.int(slot)
end

-- Name of a member: "17.2" is the second candidate of group 17.
function M.member(group, member)
  return M.int(group) .. "." .. M.int(member)
end

-- The group and the member of a name.
function M.parse_member(name)
  local group, member = string.match(name, "^(%d+)%.(%d+)$")
  return tonumber(group), tonumber(member)
end

-- The range of the entries "name …" in a set that is ordered by name.
function M.entries_of(name)
  return "[" .. name .. " ", "[" .. name .. "!" -- '!' follows ' '
end

return M
