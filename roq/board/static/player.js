// The displayed moment: live, or a position in the history, paused or playing.

import { $, setText } from "./dom.js";
import { clock, count } from "./words.js";

export class Player {
  constructor(onChange) {
    this.onChange = onChange;
    this.timeline = null;
    this.live = true; // follow the newest event
    this.playing = false;
    this.position = 0;
    this.time = 0; // ms on the server's clock, while playing
    this.growing = true; // more events may arrive
    this.slider = $("#slider");
    this.slider.addEventListener("input", () => this.seek(Number(this.slider.value)));
    $("#play").addEventListener("click", () => (this.playing ? this.pause() : this.play()));
    $("#to-start").addEventListener("click", () => this.seek(this.timeline.first));
    $("#back").addEventListener("click", () => this.seek(this.at() - 1));
    $("#forward").addEventListener("click", () => this.seek(this.at() + 1));
    $("#live").addEventListener("click", () => this.goLive());
    $("#speed").addEventListener("change", () => this.#startClock());
  }

  reset(timeline, growing) {
    this.timeline = timeline;
    this.growing = growing;
    this.live = true;
    this.playing = false;
    setText($("#live"), growing ? "Live" : "End");
  }

  // The displayed position.
  at() {
    return this.live ? this.timeline.end : this.position;
  }

  seek(position) {
    this.playing = false;
    this.live = false;
    this.position = Math.min(Math.max(position, this.timeline.first), this.timeline.end);
    if (!this.growing && this.position === this.timeline.end) this.live = true;
    this.onChange();
  }

  goLive() {
    this.playing = false;
    this.live = true;
    this.onChange();
  }

  play() {
    if (this.at() >= this.timeline.end) this.position = this.timeline.first;
    this.live = false;
    this.playing = true;
    this.#startClock();
    this.onChange();
  }

  pause() {
    this.playing = false;
    this.onChange();
  }

  #startClock() {
    if (!this.timeline) return;
    this.time = this.timeline.time(this.at());
    this.since = 0; // time of the last step, ms
  }

  // Advance by this many milliseconds of real time.
  tick(passed) {
    if (!this.playing) return;
    const [how, value] = $("#speed").value.split(" ");
    if (how === "step") {
      this.since += passed;
      if (this.since >= 1000 / Number(value)) {
        this.since = 0;
        this.position += 1;
      }
    } else {
      this.time += passed * Number(value);
      this.position = Math.max(this.position, this.timeline.positionOf(this.time));
    }
    this.position = Math.max(this.position, this.timeline.first);
    if (this.position >= this.timeline.end) {
      this.position = this.timeline.end;
      this.playing = false;
      this.live = true;
    }
  }

  draw() {
    const { first, end } = this.timeline;
    const at = this.at();
    this.slider.min = first;
    this.slider.max = end;
    this.slider.value = at;
    const time = this.timeline.time(at);
    const text = `event ${count(at)} of ${count(end)}`;
    setText($("#position"), text);
    setText($("#position-time"), time ? clock(time) : "");
    this.slider.setAttribute("aria-valuetext", time ? `${text}, ${clock(time)}` : text);
    const play = $("#play");
    play.firstElementChild.firstElementChild.setAttribute("d", this.playing ? "M4 3h3v10H4zM9 3h3v10H9z" : "M4 3v10l8-5z");
    play.setAttribute("aria-label", this.playing ? "Pause the replay" : "Play");
    $("#live").setAttribute("aria-pressed", String(this.live));
  }
}
