--[[
roq_announce_sender: the address of the trainer's weight sender, for workers that receive weights instead of reading
them. It is valid until another trainer takes over. Idempotent.

Arguments:
  trainer   the trainer's name
  address   the sender's address, which workers get with `pin`; "" for none
Reply:
  address
Refusals:
  ROQ_FENCED      another trainer has taken over
  ROQ_NOT_READY   no trainer has taken a batch yet
]]
local LONGEST = 512 -- bytes

transition.define({
  name = "announce_sender",
  arguments = { "trainer:name", "address:text" },
  frees = true,
  apply = function(run, args)
    if #args.address > LONGEST then
      refuse.with("INVALID", "an address of %d bytes is longer than %d", #args.address, LONGEST)
    end
    trainers.require(run, args.trainer)
    trainers.seen(run)
    if args.address == "" then
      changes.hdel(run.key.sender, "address")
    else
      changes.hset(run.key.sender, "address", args.address)
    end
    return { address = args.address }
  end,
})
