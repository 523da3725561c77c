// Equations are rendered on each page by KaTeX, which is part of the site.
document.addEventListener("DOMContentLoaded", () =>
  document.querySelectorAll(".arithmatex").forEach((part) =>
    renderMathInElement(part, {
      delimiters: [
        { left: "\\[", right: "\\]", display: true },
        { left: "\\(", right: "\\)", display: false },
      ],
    })
  )
);
