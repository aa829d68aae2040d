"use strict";
// The index of an atlas: each name links to its entry on its layer's page.
{
  const pages = JSON.parse(document.getElementById("data").textContent);
  document.getElementById("go").addEventListener("change", (event) => {
    const name = event.target.value.trim().toUpperCase(), layer = /^L(\d+)[NH]\d+$/.exec(name)?.[1];
    if (pages[layer]) location.href = `${pages[layer]}#${name}`;
  });
}
