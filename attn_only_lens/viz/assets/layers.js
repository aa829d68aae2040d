"use strict";
// The index of an atlas: entering a name opens the page of its layer.
{
  const pages = JSON.parse(document.getElementById("data").textContent);
  document.getElementById("go").addEventListener("change", (event) => {
    const name = event.target.value.trim().toUpperCase(), layer = /^L(\d+)(?:E\d+(?=N))?[NH]\d+$/.exec(name)?.[1];
    if (pages[layer]) location.href = `${pages[layer]}#${name}`;
  });
}
