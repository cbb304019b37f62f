--[[
roq_version: the version of the loaded library.

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
