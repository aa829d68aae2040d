"use strict";
// The index of an atlas: a neuron's name opens the page of its layer at this neuron.
{
  const pages = JSON.parse(document.getElementById("data").textContent);
  document.getElementById("go").addEventListener("change", (event) => {
    const name = event.target.value.trim().toUpperCase(), layer = /^L(\d+)N\d+$/.exec(name)?.[1];
    if (pages[layer]) location.href = `${pages[layer]}#${name}`;
  });
}
