--[[
roq_version: which library is loaded.

Arguments: none (and no keys)
Reply:     the version, as text
]]
transition.plain({
  name = "version",
  arguments = {},
  reads = true,
  apply = function()
    return LIBRARY_VERSION
  end,
})
